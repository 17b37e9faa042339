# inference-sglang: the inference service with SGLang beside it, each in an environment of its own (docs/gpu.md).
# It stands on SGLang's own image, which brings what a list of Python packages cannot: CUDA's compiler and headers for the
# kernels that are made at the first start, NCCL, DeepGEMM, in versions that its makers tried together. Our part is installed
# with that image's Python into /opt/etude, and touches nothing else. In a file of its own: the classic builder makes every
# stage above the one that is asked for.
# Another build of the same version: --build-arg SGLANG=…; flags, endpoints and layouts were read from 0.5.23 alone.
ARG SGLANG=lmsysorg/sglang:v0.5.23

FROM ${SGLANG} AS packages
ARG SGLANG_PYTHON=/usr/bin/python3
ARG UV=0.9.7
# Ours only hashes and writes weights, on the CPU.
ARG TORCH_BACKEND=cpu
ARG EXTRAS=""
ENV UV_LINK_MODE=copy UV_COMPILE_BYTECODE=1 UV_PYTHON_DOWNLOADS=never UV_NO_CACHE=1
RUN "${SGLANG_PYTHON}" -m pip install --no-cache-dir --break-system-packages uv==${UV} \
 && "${SGLANG_PYTHON}" -m uv venv --python "${SGLANG_PYTHON}" /opt/etude
WORKDIR /src
COPY pyproject.toml ./
COPY constraints/linux.txt constraints/linux.txt
# hadolint ignore=SC2086
RUN "${SGLANG_PYTHON}" -m uv pip install --python /opt/etude -c constraints/linux.txt -r pyproject.toml \
    ${TORCH_BACKEND:+--torch-backend "${TORCH_BACKEND}"} --extra kafka --extra s3 --extra inference ${EXTRAS}
COPY . .
RUN "${SGLANG_PYTHON}" -m uv pip install --python /opt/etude --no-deps .

FROM ${SGLANG} AS inference-sglang
ARG SGLANG_PYTHON=/usr/bin/python3
# Another version, or SGLang in another place, ends the build here and not the first start.
RUN "${SGLANG_PYTHON}" -c "from importlib.metadata import version as v; assert v('sglang') == '0.5.23', v('sglang')"
# /state, /kernels and what is mounted there belong to the user: a volume takes its owner from here when it is first used.
RUN useradd --uid 10001 --user-group --no-create-home --shell /usr/sbin/nologin etude \
 && install -d -o etude -g etude -m 0700 /state /state/run /kernels \
 && install -d -o etude -g etude /work
COPY infra/docker/probe.py /usr/local/lib/etude/probe.py
COPY --from=packages /opt/etude /opt/etude
# SGLang's compilers keep what they make below HOME: Triton, FlashInfer, DeepGEMM, TVM and CUDA itself. torch asks by name.
# hadolint ignore=DL3064
ENV PATH=/opt/etude/bin:$PATH \
    HOME=/kernels \
    TORCHINDUCTOR_CACHE_DIR=/kernels/inductor \
    NUMBA_CACHE_DIR=/kernels/numba \
    PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 \
    OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false \
    ETUDE_STATE=/state ETUDE_HOST=0.0.0.0 ETUDE_PORT=8700 ETUDE_LOGS=json \
    ETUDE_ENGINE=sglang ETUDE_SGLANG_PYTHON=${SGLANG_PYTHON}
EXPOSE 8700
WORKDIR /work
ENTRYPOINT []
USER 10001:10001
# Which commit it is made of, last: nothing is made again because only that is another one.
ARG REVISION CREATED VERSION
LABEL org.opencontainers.image.revision=$REVISION org.opencontainers.image.created=$CREATED org.opencontainers.image.version=$VERSION \
      org.opencontainers.image.title="Étude" org.opencontainers.image.licenses="Apache-2.0"
