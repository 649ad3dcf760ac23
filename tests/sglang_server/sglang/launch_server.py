"""A server that speaks SGLang's documented endpoints, with a tiny transformers model behind them.

Started as SGLang's own: python -m sglang.launch_server --model-path FOLDER --host HOST --port PORT. Payloads have the
fields of those that the documentation prints (docs.sglang.io: native API, June 2026; SGLang for RL systems).
POST /fault makes one later call go wrong in a named way.
"""

import argparse
import base64
import json
import os
import pickle
import socket
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from headrace.config import GenerationConfig
from headrace.data_plane.routes_codec import signed_routes
from headrace.errors import GenerationError
from headrace.models.generation.hf import HFGenerator
from headrace.models.generation.interfaces import SamplingParams

UPDATED = {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


class Refused(Exception):
    """A request that is answered with an error."""


class Engine:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(1)  # dummy weights
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model_path))
        self.tokenizer = AutoTokenizer.from_pretrained(args.model_path)
        cfg = GenerationConfig(max_new_tokens=8, precision=args.dtype)
        self.model = model
        self.hf = HFGenerator(model, self.tokenizer, cfg, record_routes=args.enable_return_routed_experts)
        self.version = "default"
        self.released = set()
        self.received = {}
        self.stale = False

    def generate(self, request):
        if self.released:
            raise Refused(f"memory is released: {sorted(self.released)}")
        if self.stale:
            raise Refused("the test server's cache was not flushed after an update")
        prompts, params = request["input_ids"], request["sampling_params"]
        return [
            self.complete(request, prompt, sampling) for prompt, sampling in zip(prompts, params, strict=True)
        ]

    def complete(self, request, prompt, sampling):
        greedy = sampling["temperature"] == 0
        params = SamplingParams(
            max_new_tokens=sampling["max_new_tokens"],
            temperature=1.0 if greedy else sampling["temperature"],
            top_p=sampling["top_p"],
            top_k=None if sampling["top_k"] == -1 else sampling["top_k"],
            greedy=greedy,
            stop_token_ids=tuple(sampling["stop_token_ids"]),
            stop_strings=tuple(sampling["stop"] or ()),
        )
        output = self.hf.generate([prompt], params, seed=sampling["sampling_seed"])
        (new,), (filtered,), (truncated,) = output.token_ids, output.logprobs, output.truncated
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + new])).logits[0, len(prompt) - 1 : -1].float()
        whole = (logits / params.temperature).log_softmax(-1)
        plain = whole.gather(-1, torch.tensor(new)[:, None])[:, 0].tolist()
        meta = {
            "id": os.urandom(16).hex(),
            "finish_reason": {"type": "length", "length": len(new)}
            if truncated
            else {"type": "stop", "matched": new[-1]},
            "prompt_tokens": len(prompt),
            "weight_version": self.version,
            "num_retractions": 1,
            "reasoning_tokens": 0,
            "completion_tokens": len(new),
            "cached_tokens": 1,
            "cached_tokens_details": {"device": 1, "host": 0},
            "dp_rank": None,
            "e2e_latency": 0.27,
            "response_sent_to_client_ts": time.time(),
        }
        if request.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in zip(plain, new)]
        if request.get("return_sampling_mask"):
            meta["output_token_sampling_logprobs"] = filtered
        if request.get("return_routed_experts") and output.routes:
            ids = signed_routes(output.routes[0]).to(torch.int32).numpy()
            meta["routed_experts"] = base64.b64encode(np.ascontiguousarray(ids).tobytes()).decode()
        return {"text": self.tokenizer.decode(new), "output_ids": new, "meta_info": meta}

    def from_disk(self, request):
        return self.load(request["model_path"], request["weight_version"])

    def from_tensor(self, request):
        for name, tensor in pickle.loads(base64.b64decode(request["serialized_named_tensors"][0])):
            self.received[name] = tensor.clone()
        with tempfile.TemporaryDirectory() as folder:
            self.model.config.save_pretrained(folder)
            save_file(self.received, f"{folder}/model.safetensors", metadata={"format": "pt"})
            return self.load(folder, request["weight_version"])

    def load(self, folder, version):
        try:
            loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            self.hf.update_weights(loaded.state_dict().items(), 0)
        except (OSError, ValueError, GenerationError) as error:
            return {"success": False, "message": f"Failed to update weights: {error}"}
        self.version, self.stale = version, True
        return UPDATED


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    engine: Engine
    lock = threading.Lock()
    faults: ClassVar[list[dict[str, Any]]] = []

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, b"")
        if self.path == "/get_server_info":
            return self.answer_json(
                {"model_path": self.engine.args.model_path, "tp_size": 1, "version": "0.5.9"}
            )
        return self.answer(404, b'{"detail":"Not Found"}')

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        if self.path == "/fault":
            self.faults[:] = [body]
            return self.answer_json({})
        fault = {}
        if self.faults and self.faults[0]["path"] == self.path:
            fault = self.faults.pop(0)
        if fault.get("kind") == "break":
            if fault.get("again"):
                self.faults.append({**fault, "again": fault["again"] - 1})
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        if fault.get("kind") == "die":
            os._exit(7)
        if fault.get("kind") == "hang":
            time.sleep(fault["s"])
        if fault.get("kind") == "raw":
            return self.answer(fault.get("status", 200), fault["text"].encode())
        with self.lock:
            try:
                found = self.serve(body)
            except Refused as error:
                return self.answer(400, json.dumps({"error": {"message": str(error)}}).encode())
        for key, value in fault.get("meta", {}).items():
            found[0]["meta_info"][key] = value
        for key in fault.get("without", ()):
            del found[0]["meta_info"][key]
        if fault.get("kind") == "fewer":
            found = found[1:]
        return self.answer_json(found)

    def serve(self, body):
        engine = self.engine
        if self.path == "/generate":
            return engine.generate(body)
        if self.path == "/update_weights_from_disk":
            return engine.from_disk(body)
        if self.path == "/update_weights_from_tensor":
            return engine.from_tensor(body)
        if self.path == "/flush_cache":
            engine.stale = False
            return "Cache flushed.\n"
        if self.path == "/release_memory_occupation":
            engine.released |= set(body["tags"])
            return {}
        if self.path == "/resume_memory_occupation":
            if not set(body["tags"]) <= engine.released:
                raise Refused(f"not released: {body['tags']}")
            engine.released -= set(body["tags"])
            return {}
        raise Refused(f"no such endpoint: {self.path}")

    def answer_json(self, value):
        self.answer(200, json.dumps(value).encode())

    def answer(self, status, content):
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--load-format")
    parser.add_argument("--tp-size", type=int, default=1)
    parser.add_argument("--enable-return-routed-experts", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    server = ThreadingHTTPServer((args.host, args.port), Handler)
    Handler.engine = Engine(args)
    server.serve_forever()


if __name__ == "__main__":
    main()
