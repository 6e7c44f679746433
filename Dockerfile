# One image for all subcommands of `dualmap`: the operator, the router, simulated engines and Envoy's configuration.
#
#   docker build -t ghcr.io/dualmap/dualmap:0.1.0 .                            (or podman, or buildah; `make image`)
#   docker buildx build --platform linux/amd64,linux/arm64 --push -t ... .     (several architectures)
#   docker build --target epp -t ghcr.io/dualmap/dualmap-epp:0.1.0 .           (for the charts of other pickers)
#
# The target `epp` is the same image with another entry point: the charts of the Gateway API Inference Extension and of
# llm-d give the picker's container arguments, but no command (docs/change-the-picker.md).
#
# The container runs as user 65532 with a read-only root filesystem, because its programs write no files.
#
# BASE is a Debian image with Python 3.11. The default is a tag without a digest. A release sets the digest:
# --build-arg BASE=python:3.11-slim-bookworm@sha256:...
ARG BASE=python:3.11-slim-bookworm

FROM ${BASE} AS build
# To build without a package index, use podman or buildah with these arguments, as e2e/controlplane/images.py does:
#   --build-arg PIP_NO_INDEX=1 --build-arg PIP_FIND_LINKS=/wheels --volume $PWD/wheels:/wheels:ro
# The folder `wheels` then contains the wheels for BASE's Python.
ARG PIP_NO_INDEX
ARG PIP_FIND_LINKS
# uv uses the certificates of the base image, as pip does.
ARG UV_SYSTEM_CERTS=1
ARG UV_NO_CACHE=1
WORKDIR /build
# Every package must have one of the hashes in constraints.txt. pip installs uv, because pip accepts hashes only for
# requirements with a fixed version. Both are in another environment than dualmap.
COPY pyproject.toml constraints.txt ./
RUN python3 -m venv tools && python3 -m venv --without-pip /opt/dualmap \
    && sed -n '/^uv==/,/[^\\]$/p' constraints.txt > uv.txt \
    && tools/bin/pip install --quiet --disable-pip-version-check --no-cache-dir --require-hashes --requirement uv.txt \
    && echo "${PIP_NO_INDEX:+--no-index} ${PIP_FIND_LINKS:+--find-links $PIP_FIND_LINKS}" > source.txt
# The dependencies are installed first, so that this layer does not change with our source.
RUN tools/bin/uv pip install $(cat source.txt) --quiet --python /opt/dualmap/bin/python --compile-bytecode \
        --require-hashes --constraint constraints.txt --requirement pyproject.toml --extra otlp
COPY . .
# The project itself has no hash. uv leaves its lock file, which every user may write.
RUN tools/bin/uv pip install $(cat source.txt) --quiet --python /opt/dualmap/bin/python --compile-bytecode \
        --no-deps --build-constraint constraints.txt . \
    && rm -f /opt/dualmap/.lock

FROM ${BASE} AS installed
# Remove the base image's pip, put the command on every PATH, and give the user a name.
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3.11/site-packages/* /usr/share/python-wheels \
        /usr/local/lib/python3.11/ensurepip /usr/lib/python3.11/ensurepip \
    && ln -s /opt/dualmap/bin/dualmap /usr/local/bin/dualmap \
    && echo 'dualmap:x:65532:65532:DualMap:/nonexistent:/usr/sbin/nologin' >> /etc/passwd \
    && echo 'dualmap:x:65532:' >> /etc/group
ARG VERSION=0.1.0
LABEL org.opencontainers.image.title="dualmap" \
      org.opencontainers.image.description="Routes each LLM request to the instance that holds its prefix: Envoy endpoint picker and Kubernetes operator" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}"
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
# This layer is the last because it changes most often, so that all earlier layers stay cached.
COPY --from=build /opt/dualmap /opt/dualmap

FROM installed AS epp
ENTRYPOINT ["dualmap", "epp"]

# The default target.
FROM installed
ENTRYPOINT ["dualmap"]
