"""What the plugin's hook relies on is in the released SGLang."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1] / "subscriber" / "engine_plugin"))

pytestmark = pytest.mark.engines
VENV = Path(os.environ.get("WEIGHTCAST_SGLANG_VENV", HERE.parents[1] / ".venv-sglang"))


def source(module: str) -> ast.Module:
    [package] = VENV.glob("lib/python*/site-packages/sglang")
    path = package.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__init__.py"
    return ast.parse(file.read_text())


def found(tree: ast.AST, name: str) -> ast.AST:
    kinds = (ast.ClassDef, ast.FunctionDef)
    return next(node for node in ast.walk(tree) if isinstance(node, kinds) and node.name == name)


def test_the_hooks_target_is_called_as_the_hook_expects() -> None:
    from weightcast_engine.sglang.hook import TARGET

    module, kind, method = TARGET.rsplit(".", 2)
    function = found(found(source(module), kind), method)
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["self", "named_tensors", "load_format"]
    fields = ast.unparse(found(source(module), kind))
    assert "get_model: Callable" in fields and "model_config: ModelConfig" in fields


def test_questions_are_answered_between_two_steps_of_the_scheduler() -> None:
    from weightcast_engine.sglang.hook import ASKED

    module, kind, method = ASKED.rsplit(".", 2)
    function = found(found(source(module), kind), method)
    assert isinstance(function, ast.FunctionDef)
    assert [argument.arg for argument in function.args.args] == ["self", "recv_req"]
    assert "self.tp_worker.weight_update_runners()" in ast.unparse(found(source(module), kind))
    scheduler = ast.unparse(source("sglang.srt.managers.scheduler"))
    assert "CheckWeightsReqInput, self.weight_updater.check_weights" in scheduler.replace("(", "").replace(
        ")", ""
    )


def test_the_servers_own_loads_are_where_the_hook_expects_them() -> None:
    from weightcast_engine.sglang.hook import ENDED, LOADS, RELOADS

    for target in (RELOADS, *LOADS):
        module, kind, method = target.rsplit(".", 2)
        assert isinstance(found(found(source(module), kind), method), ast.FunctionDef)
    ended = found(found(source(ENDED.rsplit(".", 2)[0]), "WeightUpdater"), "end_weight_update")
    assert isinstance(ended, ast.FunctionDef) and [a.arg for a in ended.args.kwonlyargs] == ["run_post_load"]
    reload = ast.unparse(found(source(RELOADS.rsplit(".", 2)[0]), "update_weights_from_disk"))
    assert "-> tuple[bool, str]" in reload and "return (True, " in reload


def test_hooks_around_get_the_original_first() -> None:
    text = ast.unparse(source("sglang.srt.plugins.hook_registry"))
    assert "AROUND = 'around'" in text and "def register(" in text
    groups = ast.unparse(source("sglang.srt.distributed.parallel_state"))
    assert "def get_tp_group(" in groups and "def all_gather_object(self, obj" in groups


def test_what_the_hook_asks_before_it_patches_is_there() -> None:
    """What SGLang itself refuses updates for, and how it marks layers that it has packed."""
    from weightcast_engine.sglang.hook import TARGET

    updates = source(TARGET.rsplit(".", 2)[0])
    refusal = found(updates, "_unsupported_derived_weight_cache_error")
    assert isinstance(refusal, ast.FunctionDef) and [a.arg for a in refusal.args.args] == ["model"]
    shared = found(found(updates, "WeightUpdater"), "_assert_weight_cache_inactive")
    assert "raise RuntimeError" in ast.unparse(shared)
    layers = "sglang.srt.layers"
    assert "module.use_intel_amx_backend =" in ast.unparse(source(f"{layers}.amx_utils"))
    plain = ast.unparse(source(f"{layers}.quantization.unquant"))
    for mark in ("_use_aiter =", "self.w13_swiglu_interleaved =", "self.use_flashinfer_trtllm_moe ="):
        assert mark in plain
    asked = ast.walk(found(found(source("sglang.srt.utils.weight_checker"), "WeightChecker"), "handle"))
    questions = {node.comparators[0].value for node in asked if isinstance(node, ast.Compare)}
    assert questions == {"snapshot", "reset_tensors", "compare", "checksum"}, "which of them change weights?"
