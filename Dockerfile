# The translation service:
#   docker build --tag transduce .                 (--build-arg PIP_FLAGS="--index-url URL" for another index)
#   docker run --publish 8080:8080 --volume "$PWD/runs:/runs:ro" transduce /runs/en-de
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends g++ make
COPY . /src
RUN make -C /src wheel

# Without PyTorch: the native library runs Transformers. For other models, or GPUs, install "[serve,train]" below.
FROM python:3.11-slim
ARG PIP_FLAGS=""
COPY constraints.txt /
COPY --from=build /src/dist /wheels
RUN pip install --no-cache-dir ${PIP_FLAGS} --constraint /constraints.txt "$(echo /wheels/*.whl)[serve]" \
    && useradd --create-home transduce
USER transduce
EXPOSE 8080
STOPSIGNAL SIGTERM
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health')"]
ENTRYPOINT ["transduce", "serve", "--host", "0.0.0.0"]
