"""Reading Kubernetes objects as parsed JSON: InferencePools into pools, pods into whether they serve.

May import policies, pools and errors; sends and opens nothing.
"""
