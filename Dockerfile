# One Dockerfile for every image; `ferry image build NAME` reads images/NAME.yaml and gives each argument below.
#
# It runs three times. `--target environment` makes the locked environment, which stays in the engine as an image;
# `--target facts` lists what is in it; the last run puts the start program and that list on top of it. So a change of
# Ferry, or of what stands below that stage here, takes seconds. Packages are installed straight into
# the image's own layers, the largest by themselves, and DeepSpeed is compiled beside them with these layers mounted: no
# file of 7 GB is ever copied. Every step gives what it writes one fixed time and nothing of it goes elsewhere, so two
# builds give the same layers without BuildKit's rewrite-timestamp, which rewrites each of them on each build.
# No step uses the network: base, packages and start program come in as build contexts, fetched and hash-checked outside,
# so that no index, proxy or certificate of the builder leaves a trace. The image holds the environment only: code comes
# from a bundle.
#
# A plain `docker build .` builds the cuda image from scratch: the defaults below, a base by tag from the engine's
# registry, packages by hash from the index that pip or `--secret id=pip.conf,src=FILE` names (and `--secret id=ca,src=FILE`
# for its certificate). It is what the ecosystem expects, good to look at, and not pinned: no run takes it.

# The base: from the tars that images/base/bootstrap.sh makes (made-base, made-toolchain), or from a registry.
# `--build-context base=docker-image://NAME@sha256:...` (and toolchain=...) replaces either.
ARG BASE=debian-toolchain TOOLCHAIN=debian-toolchain

FROM debian:bookworm-slim AS debian-base
RUN apt-get update && \
    apt-get install --yes --no-install-recommends ca-certificates python3 python3-venv && \
    rm -rf /var/lib/apt/lists/*

FROM debian-base AS debian-toolchain
RUN apt-get update && \
    apt-get install --yes --no-install-recommends g++ python3-dev && \
    rm -rf /var/lib/apt/lists/*

FROM scratch AS made-base
ARG BASE_TAR
ADD ${BASE_TAR} /

FROM scratch AS made-toolchain
ARG TOOLCHAIN_TAR
ADD ${TOOLCHAIN_TAR} /

FROM ${BASE} AS base

FROM ${TOOLCHAIN} AS toolchain


# The recipe and what it runs with; its folders are mounted into the steps below, under the same paths.
FROM toolchain AS recipe
ARG LOCK=lockfiles/cuda.txt BUILD_LOCK=lockfiles/build.txt
ARG LAYERS="nvidia-cublas-cu12 nvidia-cudnn-cu12 | nvidia-* | torch triton" FROM_SOURCE=deepspeed
COPY images/venv.sh images/deepspeed_source.py /mnt/recipe/
COPY ${LOCK} /mnt/recipe/lock.txt
COPY ${BUILD_LOCK} /mnt/recipe/build_lock.txt
RUN printf 'export %s\n' VENV=/opt/venv PYTHON=/usr/bin/python3 WHEELS=/mnt/wheels TOOLS=/mnt/tools BUILT=/mnt/built \
    WORK=/tmp/work RECIPE=/mnt/recipe LOCK=/mnt/recipe/lock.txt BUILD_LOCK=/mnt/recipe/build_lock.txt \
    "LAYERS='${LAYERS}'" "FROM_SOURCE='${FROM_SOURCE}'" > /mnt/recipe/settings

# Only without `--build-context wheels=FOLDER`.
FROM recipe AS fetched
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf --mount=type=secret,id=ca,target=/etc/pip-ca.pem \
    if [ -e /etc/pip-ca.pem ]; then export PIP_CERT=/etc/pip-ca.pem; fi && \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh fetch

FROM scratch AS wheels
COPY --from=fetched /mnt/wheels /

FROM recipe AS tools
RUN --network=none --mount=type=bind,from=wheels,target=/mnt/wheels \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh tools


FROM base AS packages
ARG SOURCE_DATE_EPOCH=1767225600
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=bind,from=tools,source=/mnt/recipe,target=/mnt/recipe \
    --mount=type=bind,from=tools,source=/mnt/tools,target=/mnt/tools \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh packages 1
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=bind,from=tools,source=/mnt/recipe,target=/mnt/recipe \
    --mount=type=bind,from=tools,source=/mnt/tools,target=/mnt/tools \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh packages 2
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=bind,from=tools,source=/mnt/recipe,target=/mnt/recipe \
    --mount=type=bind,from=tools,source=/mnt/tools,target=/mnt/tools \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh packages 3
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=bind,from=tools,source=/mnt/recipe,target=/mnt/recipe \
    --mount=type=bind,from=tools,source=/mnt/tools,target=/mnt/tools \
    . /mnt/recipe/settings && /mnt/recipe/venv.sh packages rest

FROM tools AS built
ARG OPS="cpu_adam cpu_adagrad cpu_lion pin_memory shm_comm" ARCH=x86-64-v3 ACCELERATOR=cuda
RUN --network=none --mount=type=bind,from=wheels,target=/mnt/wheels \
    --mount=type=bind,from=packages,source=/opt/venv,target=/opt/venv \
    . /mnt/recipe/settings && export OPS="${OPS}" ARCH="${ARCH}" ACCELERATOR="${ACCELERATOR}" && \
    /mnt/recipe/venv.sh build

FROM packages AS environment
ARG SOURCE_DATE_EPOCH=1767225600 ACCELERATOR=cuda
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=built,source=/mnt/built,target=/mnt/built \
    --mount=type=bind,from=tools,source=/mnt/recipe,target=/mnt/recipe \
    --mount=type=bind,from=tools,source=/mnt/tools,target=/mnt/tools \
    . /mnt/recipe/settings && WHEELS=/mnt/built && /mnt/recipe/venv.sh install
ENV PATH=/opt/venv/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    DS_ACCELERATOR=${ACCELERATOR}


# What the environment holds: the list of its files, and of its packages. Looked at from inside, with nothing of it
# imported; the program that looks comes in as /opt/ferry will.
FROM environment AS looked
RUN --network=none --mount=type=tmpfs,target=/tmp --mount=type=bind,from=ferry,target=/mnt/ferry \
    mkdir /facts && tar --extract --file=/mnt/ferry/ferry.tar --directory=/tmp && \
    /opt/venv/bin/python -I -S -B -c "import sys; sys.path.insert(0, '/tmp/opt/ferry'); \
    from runner.inside.facts import main; main()" /opt/venv /facts

FROM scratch AS facts
COPY --from=looked /facts /

# /opt/ferry: runner/inside and the start program, the lock, IDENTITY, the list and the SBOM. Last, since it changes most;
# as one tar, which carries times, owners and order itself. Only without `--build-context ferry=FOLDER` is it made here,
# and then without list and SBOM: no run starts from an image that has none.
FROM recipe AS start
ARG SOURCE_DATE_EPOCH=1767225600
COPY images/start.py /opt/ferry/start
COPY runner/__init__.py runner/errors.py /opt/ferry/runner/
COPY runner/inside/*.py /opt/ferry/runner/inside/
RUN cp /mnt/recipe/lock.txt /opt/ferry/lock.txt && \
    printf '{"lock": "sha256:%s", "pinned": false}\n' "$(sha256sum < /opt/ferry/lock.txt | cut -c 1-64)" > /opt/ferry/IDENTITY && \
    tar --create --file=/mnt/ferry.tar --directory=/ --format=gnu --sort=name --mtime=@${SOURCE_DATE_EPOCH} \
    --owner=0 --group=0 --numeric-owner --mode=u=rwX,go=rX --no-recursion opt --recursion opt/ferry

FROM scratch AS ferry
COPY --from=start /mnt/ferry.tar /

FROM environment
RUN --network=none --mount=type=bind,from=ferry,target=/mnt/ferry \
    tar --extract --file=/mnt/ferry/ferry.tar --directory=/ --same-owner
USER 65534:65534
WORKDIR /
ENTRYPOINT ["/opt/venv/bin/python", "-I", "/opt/ferry/start"]
