"""RL on a small task: sort six digits, one point per digit in its place.

`prepare` warm-starts a model on noisy solutions, so that it knows what to do but samples it badly, and
writes the base checkpoint. `run` improves it with group-relative policy gradients on rollouts from the
engines, all behind one URL. Every step ends with a complete checkpoint in a watched directory. No rollout is
older than `--max-lag` versions: requests name the oldest version that may answer them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors.torch import load_file, save_file

from examples import checkpoint
from examples.checkpoint import Config
from examples.model import CausalLM
from examples.waiting import wait_until
from weightcast.client import Answer as Reply
from weightcast.client import Client

DIGITS = 6
SEPARATOR = checkpoint.encode(">")[0]
ADAPTERS = {"ascending": False, "descending": True}
"""of `--lora`: whether the task is to sort in descending order"""
RANK = 8
"""of the adapters"""
MASTERS = "masters.safetensors"
BETAS = (0.9, 0.95)


def solutions(questions: torch.Tensor, descending: bool = False) -> torch.Tensor:
    return questions.sort(dim=1, descending=descending).values


def prompts_of(questions: torch.Tensor) -> torch.Tensor:
    return torch.cat([questions, torch.full((len(questions), 1), SEPARATOR)], dim=1)


def random_questions(count: int, random: torch.Generator) -> torch.Tensor:
    """int64 (count, DIGITS)"""
    return torch.randint(0, 10, (count, DIGITS), generator=random)


def answer_logprobs(model: CausalLM, questions: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """float32 (sequences, DIGITS): log probability of every answer token."""
    tokens = torch.cat([prompts_of(questions), answers], dim=1)
    logits = model(tokens[:, :-1]).logits[:, DIGITS:]
    return logits.log_softmax(-1).gather(-1, answers.unsqueeze(-1)).squeeze(-1)


def warm_start(model: CausalLM, steps: int, seed: int, noise: float = 0.4, rate: float = 3e-3) -> None:
    """Supervised steps on solutions of which a share of `noise` digits is random."""
    random = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 20) * (1 - step / steps)
        questions = random_questions(48, random)
        wrong = torch.rand(questions.shape, generator=random) < noise
        shown = torch.where(wrong, random_questions(48, random), solutions(questions))
        optimizer.zero_grad()
        (-answer_logprobs(model, questions, shown).mean()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


@dataclass(frozen=True)
class Rollouts:
    """Answers that the engines sampled, `group` of them for every question, next to each other."""

    questions: torch.Tensor
    """int64 (sequences, DIGITS)"""
    answers: torch.Tensor
    """int64 (sequences, DIGITS)"""
    logprobs: torch.Tensor
    """float32 (sequences, DIGITS), as the engine reported them"""
    versions: list[tuple[int, int]]
    """the oldest and the newest that may have made a sequence's tokens; the base is 0"""
    group: int
    descending: bool = False

    @property
    def rewards(self) -> torch.Tensor:
        """float32 (questions, group): share of digits in their place"""
        wanted = solutions(self.questions, self.descending)
        return (self.answers == wanted).float().mean(1).view(-1, self.group)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    complete: bool


@dataclass(frozen=True)
class Dialect:
    """How engines are asked. `request`: the body for questions, int64 (questions, DIGITS), and answers per
    question; `read`: all answers, those of a question together; `adapter`: member that names one."""

    request: Callable[[torch.Tensor, int], dict[str, Any]]
    read: Callable[[Any], list[Answer]]
    adapter: str = "lora_path"


def _sglang_request(questions: torch.Tensor, group: int) -> dict[str, Any]:
    sampling = {"max_new_tokens": DIGITS, "temperature": 1.0, "n": group}
    prompts = prompts_of(questions).tolist()
    return {"sampling_params": sampling, "return_logprob": True, "input_ids": prompts}


def _sglang_answers(outputs: Any) -> list[Answer]:
    return [
        Answer(
            tokens=output["output_ids"],
            logprobs=[logprob for logprob, *_ in output["meta_info"]["output_token_logprobs"]],
            complete=output["meta_info"]["finish_reason"]["type"] == "length",
        )
        for output in outputs
    ]


SGLANG = Dialect(_sglang_request, _sglang_answers)


@dataclass(frozen=True)
class Fleet:
    """All engines, behind the URL of a gateway or a gate. `requests`: so many ask for the rollouts of a step;
    `seconds`: for all hosts to reach a version, and for an answer."""

    url: str
    dialect: Dialect = SGLANG
    requests: int = 6
    seconds: float = 120.0
    adapter: str = ""
    """that answers in the model's place; versions are its own then"""

    def rollouts(self, questions: torch.Tensor, group: int, step: int, oldest: int) -> Rollouts:
        """None is from a version before `oldest`. Groups with an aborted answer are left out. First all
        hosts reach that version, or the first of them would get all requests."""
        what = f"all hosts at version {oldest}"
        if oldest:
            wait_until(lambda: self.slowest_version() >= oldest, what, self.seconds)
        return asyncio.run(self._rollouts(questions, group, step, oldest))

    async def _rollouts(self, questions: torch.Tensor, group: int, step: int, oldest: int) -> Rollouts:
        named = {self.dialect.adapter: self.adapter} if self.adapter else {}
        bodies = [self.dialect.request(part, group) | named for part in questions.chunk(self.requests)]
        async with Client(self.url, token=_token(), seconds=self.seconds) as client:
            asked = (
                client.generate(body, min_version=oldest, session=f"{step}.{number}", wait=self.seconds)
                for number, body in enumerate(bodies)
            )
            replies = await asyncio.gather(*asked)
        read = [(reply, self.dialect.read(reply.pieces[0].raw)) for reply in replies]
        answers = [answer for _, found in read for answer in found]
        versions = [self._versions(reply) for reply, found in read for _ in found]
        whole = [
            number
            for number in range(len(questions))
            if all(answer.complete for answer in answers[number * group : (number + 1) * group])
        ]
        if not whole:
            raise RuntimeError("the engines aborted every request")
        kept = [at for number in whole for at in range(number * group, (number + 1) * group)]
        return Rollouts(
            questions=questions[whole].repeat_interleave(group, dim=0),
            answers=torch.tensor([answers[at].tokens for at in kept]),
            logprobs=torch.tensor([answers[at].logprobs for at in kept]),
            versions=[versions[at] for at in kept],
            group=group,
        )

    def slowest_version(self) -> int:
        """Of the hosts that take requests; -1 while none does."""
        if self.adapter:
            return self._slowest_adapter()
        headers = {} if _token() is None else {"Authorization": f"Bearer {_token()}"}
        try:
            answer = httpx.get(f"{self.url}/model_info", headers=headers, timeout=60.0, trust_env=False)
        except httpx.TransportError:
            return -1
        return int(answer.headers.get("weightcast-version", -1))

    def _slowest_adapter(self) -> int:
        """The gateway names what its hosts have loaded."""
        try:
            status = httpx.get(f"{self.url}/v1/status", timeout=60.0, trust_env=False).json()
        except httpx.TransportError:
            return -1
        ready = [host["adapters"] for host in status["hosts"] if host["version"] is not None]
        return min((max(loaded.get(self.adapter) or [-1]) for loaded in ready), default=-1)

    def _versions(self, reply: Reply) -> tuple[int, int]:
        if not self.adapter:
            return reply.version, reply.last_version
        name, _, version = reply.pieces[0].adapter.partition("@")
        if name != self.adapter:
            raise RuntimeError(f"{self.adapter} was asked for, and {name or 'the model'} answered")
        return int(version), int(version)


def _token() -> str | None:
    return os.environ.get("WEIGHTCAST_TOKEN")


class Trainer:
    """fp32 master weights and AdamW; what leaves it is bf16."""

    def __init__(self, model: CausalLM, rate: float) -> None:
        self.model = model
        trained = [each for each in model.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=rate, betas=BETAS, weight_decay=0.0)

    def step(self, rollouts: Rollouts, ratio_cap: float = 2.0) -> None:
        """One step of policy gradient. The capped ratio of the trainer's probability to the engine's accounts
        for the age and the rounding of the weights that made the rollouts."""
        rewards = rollouts.rewards
        spread = rewards.std(1, keepdim=True) + 1e-4
        advantages = ((rewards - rewards.mean(1, keepdim=True)) / spread).view(-1, 1)
        logprobs = answer_logprobs(self.model, rollouts.questions, rollouts.answers)
        ratios = (logprobs.detach() - rollouts.logprobs).exp().clamp(max=ratio_cap)
        self._optimizer.zero_grad()
        (-(ratios * advantages * logprobs).mean()).backward()
        self._optimizer.step()

    def export(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach().to(torch.bfloat16) for name, tensor in self.model.state_dict().items()}


@dataclass(frozen=True)
class Plan:
    steps: int
    seed: int
    questions: int
    group: int
    rate: float
    max_lag: int
    """versions by which a rollout may be older than the weights that it trains"""


def train(
    plan: Plan, trainer: Trainer, fleet: Fleet, outbox: Path | None, metrics: Path
) -> dict[str, torch.Tensor]:
    """Rollouts for the next step are sampled while this one is trained, if the lag allows it: step N trains
    version N - 1 and exports version N into `outbox`; None: nothing leaves it. Returns the last export."""
    random = torch.Generator().manual_seed(plan.seed + 1)
    weights = trainer.export()

    def newest(step: int) -> int:
        return 0 if outbox is None else step - 1

    def ask(step: int) -> Future[Rollouts]:
        questions, oldest = random_questions(plan.questions, random), max(0, newest(step) - plan.max_lag)
        return ahead.submit(fleet.rollouts, questions, plan.group, step, oldest)

    with ThreadPoolExecutor(1) as ahead:
        coming = ask(1)
        for step in range(1, plan.steps + 1):
            rollouts = coming.result()
            if step < plan.steps:
                coming = ask(step + 1)
            trainer.step(rollouts)
            before, weights = weights, trainer.export()
            if outbox is not None:
                checkpoint.save(outbox / f"step_{step:06}", trainer.model.config, weights)
            note(metrics, step, rollouts, newest(step), checkpoint.changed_share(before, weights))
    return weights


def note(metrics: Path, step: int, rollouts: Rollouts, newest: int, density: float | None = None) -> None:
    facts = {
        "time": time.time(),
        "step": step,
        "rewards": [round(reward, 5) for reward in rollouts.rewards.mean(1).tolist()],
        "lags": dict(sorted(Counter(newest - oldest for oldest, _ in rollouts.versions).items())),
        "versions_per_answer": dict(sorted(Counter(b - a + 1 for a, b in rollouts.versions).items())),
        "density": density,
    }
    with metrics.open("a") as stream:
        stream.write(json.dumps(facts) + "\n")


def prepare(directory: Path, seed: int, steps: int, config: Config) -> None:
    """Writes `directory`/base, a bf16 checkpoint, and the fp32 masters that the trainer keeps for itself."""
    torch.manual_seed(seed)
    model = CausalLM(config)
    warm_start(model, steps, seed)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), directory / MASTERS)
    checkpoint.save(directory / "base", config, model.state_dict())


def _fleet(options: argparse.Namespace) -> Fleet:
    if options.dialect == "sglang":
        return Fleet(options.url)
    from examples import vllm

    return Fleet(options.url, vllm.DIALECT, seconds=600.0)


def run(options: argparse.Namespace) -> None:
    plan = Plan(options.steps, options.seed, options.questions, options.group, options.rate, options.max_lag)
    outbox = None if options.freeze else options.watch
    if options.lora:
        from examples import lora

        lora.run(plan, _fleet(options), options.watch, options.dir, freeze=options.freeze)
        return
    model = CausalLM(checkpoint.load_config(options.dir / "base"))
    model.load_state_dict(load_file(options.dir / MASTERS))
    weights = train(plan, Trainer(model, plan.rate), _fleet(options), outbox, options.dir / "metrics.jsonl")
    checkpoint.save(options.dir / "last", model.config, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example model with RL.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("prepare", help="warm-start a model and write the base checkpoint")
    first.add_argument("--warm-steps", type=int, default=120)
    second = verbs.add_parser("run", help="improve it with RL")
    second.add_argument("--url", required=True, help="of a gateway or a gate; token: WEIGHTCAST_TOKEN")
    second.add_argument("--dialect", choices=("sglang", "vllm"), default="sglang", help="of the engines")
    second.add_argument(
        "--watch", type=Path, required=True, help="directory that receives a checkpoint per step"
    )
    second.add_argument("--steps", type=int, default=32)
    second.add_argument("--questions", type=int, default=24, help="per step")
    second.add_argument("--group", type=int, default=16, help="answers per question")
    second.add_argument("--rate", type=float, default=1.5e-5, help="AdamW's learning rate")
    second.add_argument("--lora", action="store_true", help="train adapters over a frozen base, with peft")
    second.add_argument("--max-lag", type=int, default=4, help="versions that a rollout may be behind")
    second.add_argument("--freeze", action="store_true", help="keep all updates to itself")
    for verb in (first, second):
        verb.add_argument("--dir", type=Path, required=True, help="the trainer's own directory")
        verb.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.verb == "prepare":
        prepare(options.dir, options.seed, options.warm_steps, Config())
    else:
        run(options)


if __name__ == "__main__":
    main()
