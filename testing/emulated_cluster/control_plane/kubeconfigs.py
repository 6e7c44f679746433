"""Kubeconfig files for the users of `cluster.py`: with a client certificate, or with a service account's token."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from emulated_cluster.control_plane.certificates import KeyPair


def write_for_certificate(path: Path, *, server: str, authority: bytes, user: KeyPair) -> Path:
    """Write the kubeconfig of a user with a client certificate."""
    credentials = {
        "client-certificate-data": _base64(user.certificate),
        "client-key-data": _base64(user.key),
    }
    return _write(path, server=server, authority=authority, credentials=credentials, namespace="default")


def write_for_token(path: Path, *, server: str, authority: bytes, token: str, namespace: str) -> Path:
    """Write the kubeconfig of a service account, with the account's namespace as the default namespace."""
    return _write(path, server=server, authority=authority, credentials={"token": token}, namespace=namespace)


def _write(path: Path, *, server: str, authority: bytes, credentials: dict[str, str], namespace: str) -> Path:
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "e2e", "cluster": {"server": server, "certificate-authority-data": _base64(authority)}}],
        "users": [{"name": "user", "user": credentials}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "user", "namespace": namespace}}],
        "current-context": "e2e",
    }
    path.touch(mode=0o600)
    # All clients accept JSON, because JSON is a subset of YAML.
    path.write_text(json.dumps(document, indent=1))
    return path


def _base64(content: bytes) -> str:
    return base64.b64encode(content).decode()
