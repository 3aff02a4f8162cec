# One Dockerfile for every image; `ferry image build NAME` reads images/NAME.yaml and gives each argument below.
#
# It runs twice: `--target environment` gives the locked environment as one tar, and the default target stacks three
# tars. A tar carries every time, owner and order itself, so two builds give the same bytes without BuildKit's
# rewrite-timestamp, which rewrites every layer on every build (100 s for 1.3 GB here, against 1 s).
# No step uses the network: packages come in as a build context, fetched and hash-checked outside, so that no index,
# proxy or certificate of the builder leaves a trace. The image holds the environment only: code comes from a bundle.

# A base from a registry replaces these two: --build-context base=docker-image://NAME@sha256:... (and toolchain=...).
FROM scratch AS base
ARG BASE_TAR
ADD ${BASE_TAR} /

FROM scratch AS toolchain
ARG TOOLCHAIN_TAR
ADD ${TOOLCHAIN_TAR} /


FROM toolchain AS venv
ARG LOCK BUILD_LOCK FROM_SOURCE OPS ARCH ACCELERATOR SOURCE_DATE_EPOCH
COPY images/venv.sh images/deepspeed_arch.py /recipe/
COPY ${LOCK} /recipe/lock.txt
COPY ${BUILD_LOCK} /recipe/build_lock.txt
ENV VENV=/opt/venv PYTHON=/usr/bin/python3 WHEELS=/wheels WORK=/build RECIPE=/recipe \
    LOCK=/recipe/lock.txt BUILD_LOCK=/recipe/build_lock.txt FROM_SOURCE=${FROM_SOURCE}
RUN --network=none --mount=type=bind,from=wheels,target=/wheels /recipe/venv.sh packages
RUN --network=none --mount=type=bind,from=wheels,target=/wheels \
    OPS="${OPS}" ARCH=${ARCH} ACCELERATOR=${ACCELERATOR} /recipe/venv.sh ops
RUN --network=none tar --create --file=/environment.tar --directory=/ --format=gnu --sort=name \
    --mtime=@${SOURCE_DATE_EPOCH} --owner=0 --group=0 --numeric-owner --no-recursion opt --recursion opt/venv

FROM scratch AS environment
COPY --from=venv /environment.tar /


FROM base
ARG ENVIRONMENT_TAR FERRY_TAR ACCELERATOR
ADD ${ENVIRONMENT_TAR} /
ENV PATH=/opt/venv/bin:/usr/bin:/bin LANG=C.UTF-8 PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 \
    DS_ACCELERATOR=${ACCELERATOR}
# /opt/ferry: runner/inside and the start program, the lock, and IDENTITY. Last, since it changes most.
ADD ${FERRY_TAR} /
USER 65534:65534
WORKDIR /
ENTRYPOINT ["/opt/venv/bin/python", "-I", "/opt/ferry/start"]
