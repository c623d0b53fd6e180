"""A server that answers as a released SGLang was measured to, with that release's request and reply models.

Run by the Python of the environment that holds the release: `sglang_server.py DIRECTORY PORT_FILE`. It
has no kernels: its weights are digests of the tensors that it read, its requests are counters. What a test
wants of it comes in through `POST /double`, what it did is told by `GET /double`.

The facts (docs/engines.md, SGLang): an update without a pause waits for the requests in flight, and sometimes
finds one just then: 400 although the weights changed. A pause in place keeps their blocks: the same. A
missing directory is 400 with the old weights kept; a truncated file ends the process; a missing tensor is a
silent mix. The label moves with a successful update that names one, and in no other case. `old`: a release
before labels. An adapter that is unloaded is gone from the list at once; the answer waits for the requests
that use it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import uvicorn
from fastapi import Body, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from sglang_release import load_models

models = load_models()
app = FastAPI()
STARTED = time.time()
LOADER = "weightcast_engine.sglang.hook.load"
ACTION = "weightcast "
NOT_FLUSHED = (
    "Weights were updated, but the cache was not flushed because requests are still running or queued. "
    "Retract or finish them, then call /flush_cache."
)


class Server:
    def __init__(self) -> None:
        self.old = False
        self.weights: dict[str, str] = {}
        self.model_path = ""
        self.label = "default"
        self.paused: str | None = None
        self.running = 0
        self.aborted = 0
        self.finished = 0
        self.stale_blocks = 0
        """requests that went on with blocks of older weights: wrong tokens"""
        self.next_update: str = ""
        """race, hang or label-stays: what the next update comes to"""
        self.draft: str | None = None
        """the algorithm of speculative decoding, which has a model of its own"""
        self.session = False
        self.applied = 0
        """patches"""
        self.held: dict[str, Any] = {}
        """version, root and label, as the hook was told"""
        self.lora = True
        self.adapters: dict[str, str] = {}
        """their directories, by name"""
        self.using: dict[str, int] = {}
        """requests under way, by the name of their adapter"""
        self.calls: list[dict[str, Any]] = []

    def load(self, directory: Path) -> None:
        """Tensors that are not there keep what they were. Raises FileNotFoundError."""
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no weights in {directory}")
        for file in files:
            self.weights |= tensors(file)


server = Server()


def tensors(file: Path) -> dict[str, str]:
    """SHA-256 by name. A file that is too short ends the process, as the real loader's crash does."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    body = memoryview(data)[8 + length :]
    found = {}
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        if stop > len(body):
            os._exit(1)
        found[name] = hashlib.sha256(body[start:stop]).hexdigest()
    return found


@app.middleware("http")
async def note(request: Request, forward: Any) -> Any:
    if not request.url.path.startswith("/double"):
        body = await request.body()
        server.calls.append(
            {
                "method": request.method,
                "path": request.url.path,
                "body": json.loads(body) if body else None,
                "unknown": unknown_fields(request.url.path, body),
            }
        )
    return await forward(request)


def unknown_fields(path: str, body: bytes) -> list[str]:
    """What the release would ignore in silence: a misspelt field is no error there."""
    model = MODELS.get(path)
    sent = json.loads(body) if body else {}
    return [] if model is None else sorted(set(sent) - set(model.__struct_fields__))


MODELS = {
    "/update_weights_from_disk": models.UpdateWeightFromDiskReqInput,
    "/update_weight_version": models.UpdateWeightVersionReqInput,
    "/pause_generation": models.PauseGenerationReqInput,
    "/continue_generation": models.ContinueGenerationReqInput,
    "/begin_weight_update": models.BeginWeightUpdateReqInput,
    "/end_weight_update": models.EndWeightUpdateReqInput,
    "/update_weights_from_tensor": models.UpdateWeightsFromTensorReqInput,
    "/weights_checker": models.CheckWeightsReqInput,
    "/load_lora_adapter": models.LoadLoRAAdapterReqInput,
    "/unload_lora_adapter": models.UnloadLoRAAdapterReqInput,
}
NO_LORA = "LoRA is not enabled. Please set `--enable-lora` to enable LoRA."


@app.post("/update_weights_from_disk")
async def update(obj: Annotated[models.UpdateWeightFromDiskReqInput, Body()]) -> JSONResponse:
    wanted, server.next_update = server.next_update, ""
    if obj.abort_all_requests:
        abort()
    if wanted == "hang":
        await asyncio.sleep(3600)
    while server.paused is None and server.running and wanted != "race":
        await asyncio.sleep(0.01)
    try:
        server.load(Path(obj.model_path))
        server.held = {}
    except FileNotFoundError as error:
        return answer(False, f"Failed to get weights iterator: {error}.")
    if server.paused == "in_place" and server.running:
        server.stale_blocks += server.running
    if obj.flush_cache and (wanted == "race" or (server.paused == "in_place" and server.running)):
        return answer(False, NOT_FLUSHED)
    server.model_path = obj.model_path
    if obj.weight_version is not None and not server.old and wanted != "label-stays":
        server.label = obj.weight_version
    return answer(True, "Succeeded to update model weights.")


def answer(success: bool, message: str) -> JSONResponse:
    reply = models.UpdateWeightFromDiskReqOutput(success=success, message=message)
    told = {name: getattr(reply, name) for name in ("success", "message", "num_paused_requests")}
    return JSONResponse(told, status_code=200 if success else 400)


class _Orders(pickle.Unpickler):
    """Exact names alone, as the release's own."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) != ("torch", "FloatTensor"):
            raise pickle.UnpicklingError(f"{module}.{name}")
        return lambda size: size


@app.post("/begin_weight_update")
async def begin(obj: Annotated[models.BeginWeightUpdateReqInput, Body()]) -> JSONResponse:
    server.session = True
    return answer(True, "")


@app.post("/end_weight_update")
async def end(obj: Annotated[models.EndWeightUpdateReqInput, Body()]) -> JSONResponse:
    server.session = False
    return answer(True, "")


@app.post("/update_weights_from_tensor")
async def update_from_tensor(
    obj: Annotated[models.UpdateWeightsFromTensorReqInput, Body()],
) -> JSONResponse:
    """The hook: its order is a tensor's name. What a patch brings lies on disk already."""
    while server.paused is None and server.running:
        await asyncio.sleep(0.01)
    if not server.session:
        return answer(False, "update_weights_from_tensor must run between begin and end")
    if obj.load_format != LOADER:
        os._exit(1)
    [raw] = obj.serialized_named_tensors
    [(name, _)] = _Orders(io.BytesIO(raw)).load()
    order = json.loads(name)
    status, told = carried_out(order["door"], order["body"])
    if status == 200 and obj.weight_version is not None:
        server.label = obj.weight_version
    added = "" if obj.weight_version is None else f" Weight version updated to {obj.weight_version}."
    return answer(status == 200, json.dumps({"status": status, **told}) + added)


@app.api_route("/weights_checker", methods=["GET", "POST"])
async def question(obj: Annotated[models.CheckWeightsReqInput, Body()]) -> JSONResponse:
    """The hook's other route: it does not wait for the requests in flight."""
    if not obj.action.startswith(ACTION):
        return answer(False, f"Unsupported action={obj.action!r}")
    order = json.loads(obj.action.removeprefix(ACTION))
    status, told = carried_out(order["door"], order["body"])
    reply = models.CheckWeightsReqOutput(
        success=status == 200, message=json.dumps({"status": status, **told})
    )
    code = 200 if reply.success else 400
    return JSONResponse({"success": reply.success, "message": reply.message}, status_code=code)


def carried_out(route: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    if route == "look":
        return 200, {"plugin": "0.1.0", "patchable": True, "in_doubt": False, **server.held}
    if route == "holds":
        server.held = body
        return 200, {}
    header = patch_header(Path(server.model_path) / ".weightcast" / "engine" / body["file"])
    if route == "check":
        wanted, server.next_update = server.next_update, ""
        if wanted == "refuse":
            return 422, {"error": "w is transposed", "tensor": "w"}
        return 200, {"changes": sum(one["changes"] for one in header["tensors"])}
    server.load(Path(server.model_path))
    server.applied += 1
    target = header["target"]
    server.held = {"version": target["version"], "root": target["root"], "label": body["label"]}
    return 200, server.held


def patch_header(file: Path) -> dict[str, Any]:
    data = file.read_bytes()
    header: dict[str, Any] = json.loads(data[16 : 16 + int.from_bytes(data[8:16], "little")])
    return header


def abort() -> None:
    server.aborted += server.running
    server.running = 0


@app.post("/pause_generation")
async def pause(obj: Annotated[models.PauseGenerationReqInput, Body()]) -> JSONResponse:
    if obj.mode == "abort":
        abort()
    server.paused = obj.mode
    return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})


@app.post("/continue_generation")
async def resume(obj: Annotated[models.ContinueGenerationReqInput, Body()]) -> JSONResponse:
    server.paused = None
    return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})


@app.post("/update_weight_version")
async def relabel(obj: Annotated[models.UpdateWeightVersionReqInput, Body()]) -> JSONResponse:
    if server.old:
        return missing()
    if obj.abort_all_requests:
        abort()
    server.label = obj.new_version
    told = f"Weight version updated to {obj.new_version}"
    return JSONResponse({"success": True, "message": told, "new_version": obj.new_version})


@app.post("/load_lora_adapter")
async def load_adapter(obj: Annotated[models.LoadLoRAAdapterReqInput, Body()]) -> JSONResponse:
    if not server.lora:
        return adapter_answer(NO_LORA)
    if obj.lora_name in server.adapters:
        return adapter_answer(f"Failed to load LoRA adapter {obj.lora_name} because it is already loaded")
    tensors(Path(obj.lora_path) / "adapter_model.safetensors")
    server.adapters[obj.lora_name] = obj.lora_path
    return adapter_answer("")


@app.post("/unload_lora_adapter")
async def unload_adapter(obj: Annotated[models.UnloadLoRAAdapterReqInput, Body()]) -> JSONResponse:
    if not server.lora:
        return adapter_answer(NO_LORA)
    if server.adapters.pop(obj.lora_name, None) is None:
        return adapter_answer(f"LoRA with name {obj.lora_name} does not exist. Loaded LoRAs: dict_keys([])")
    while server.using.get(obj.lora_name):
        await asyncio.sleep(0.01)
    return adapter_answer("")


def adapter_answer(error: str) -> JSONResponse:
    reply = models.LoRAUpdateOutput(success=not error, error_message=error or None)
    told = {
        "success": reply.success,
        "error_message": reply.error_message,
        "loaded_adapters": server.adapters,
    }
    return JSONResponse(told, status_code=400 if error else 200)


@app.get("/v1/models")
async def list_models() -> JSONResponse:
    cards = [{"id": name, "root": path, "parent": "m"} for name, path in server.adapters.items()]
    return JSONResponse({"object": "list", "data": [{"id": "m", "root": "m", "parent": None}, *cards]})


@app.get("/get_model_info")
async def old_model_info() -> JSONResponse:
    told = {"model_path": server.model_path, "is_generation": True}
    return JSONResponse(told if server.old else {**told, "weight_version": server.label})


@app.get("/model_info")
async def model_info() -> JSONResponse:
    return missing() if server.old else await old_model_info()


@app.get("/server_info")
async def server_info() -> JSONResponse:
    told = {"speculative_algorithm": server.draft, "weight_version": server.label}
    return JSONResponse({**told, "tp_size": 1, "custom_weight_loader": [LOADER]})


@app.get("/metrics")
async def metrics() -> PlainTextResponse:
    named = 'sglang:startup_time_seconds{engine_type="unified",model_name="m",phase="tokenizer_e2e"}'
    return PlainTextResponse(f"{named} {STARTED}\n")


def missing() -> JSONResponse:
    return JSONResponse({"detail": "Not Found"}, status_code=404)


@app.post("/double")
async def set_double(wishes: Annotated[dict[str, Any], Body()]) -> None:
    for name, value in wishes.items():
        setattr(server, name, value)


@app.get("/double")
async def show_double() -> JSONResponse:
    fields = list(models.UpdateWeightFromDiskReqInput.__struct_fields__)
    return JSONResponse({**vars(server), "fields": fields, "msgspec": msgspec.__version__})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("port_file", type=Path)
    arguments = parser.parse_args()
    server.model_path = str(arguments.directory)
    server.load(arguments.directory)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        part = arguments.port_file.with_suffix(".part")
        part.write_text(str(listener.getsockname()[1]))
        part.rename(arguments.port_file)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main()
