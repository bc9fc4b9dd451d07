# docker build -t onecurve . ; for GPUs: --build-arg EXTRAS=cuda
# To pin the base: --build-arg BASE=python:3.11-slim@sha256:...
ARG BASE=python:3.11-slim
FROM ${BASE}

RUN useradd --create-home --uid 1000 trainer && mkdir /runs && chown trainer /runs
WORKDIR /app
COPY setup.cfg pyproject.toml constraints.txt README.md LICENSE ./
COPY trainer trainer
COPY input_pipeline input_pipeline
COPY launch launch
ARG EXTRAS=
RUN pip install --no-cache-dir -c constraints.txt -e ".${EXTRAS:+[$EXTRAS]}"

USER 1000
VOLUME /runs
# The run directory is /runs: python -m trainer --run_dir=/runs/name ...
ENTRYPOINT ["python", "-m", "trainer"]
