"""``python -m bench paper`` repeats the published evaluations with the real router and the engine model.

``sections`` defines the measurements and plots of each section, and ``settings`` their common settings. ``cells``
defines a measurement, ``measures`` runs the measurement, and ``results`` stores its figures. ``tables`` and ``charts``
show the results, and ``command`` is the command line.
"""
