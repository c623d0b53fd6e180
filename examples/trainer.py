"""RL on a small task: sort six digits, one point per digit in its place.

`prepare` warm-starts a model on noisy solutions, so that it knows what to do but samples it badly, and
writes the base checkpoint. `run` improves it with group-relative policy gradients on rollouts from the
engines. Every step ends with a complete checkpoint in a watched directory, and nothing waits for the engines
to serve it.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import torch
from obstore.store import ObjectStore
from safetensors.torch import load_file, save_file

from examples import checkpoint
from examples.checkpoint import Config
from examples.model import CausalLM
from examples.observe import open_channel, pointer
from examples.waiting import wait_until

DIGITS = 6
SEPARATOR = checkpoint.encode(">")[0]
MASTERS = "masters.safetensors"
BETAS = (0.9, 0.95)


def solutions(questions: torch.Tensor) -> torch.Tensor:
    return questions.sort(dim=1).values


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
    versions: list[int]
    """weight version of every sequence; the base is 0"""
    group: int

    @property
    def rewards(self) -> torch.Tensor:
        """float32 (questions, group): share of digits in their place"""
        return (self.answers == solutions(self.questions)).float().mean(1).view(-1, self.group)


class Fleet:
    """The engines, seen as a user of their HTTP interface."""

    def __init__(
        self,
        urls: Sequence[str],
        timeout: float = 60.0,
        *,
        generate: Generate | None = None,
        version: Callable[[httpx.Client], int] | None = None,
    ) -> None:
        self._generate = _generate if generate is None else generate
        self._version = _version if version is None else version
        self._clients = [httpx.Client(base_url=url, timeout=timeout, trust_env=False) for url in urls]
        self._pool = ThreadPoolExecutor(len(urls))

    def close(self) -> None:
        self._pool.shutdown()
        for client in self._clients:
            client.close()

    def rollouts(self, questions: torch.Tensor, group: int) -> Rollouts:
        """One request per engine, all at the same time. Groups with an aborted answer are left out."""
        shares = questions.chunk(len(self._clients))
        replies = self._pool.map(self._generate, self._clients, shares, [group] * len(shares))
        answers = [answer for reply in replies for answer in reply]
        groups = [answers[at : at + group] for at in range(0, len(answers), group)]
        whole = [
            number for number, members in enumerate(groups) if all(member.complete for member in members)
        ]
        if not whole:
            raise RuntimeError("the engines aborted every request")
        kept = [answer for number in whole for answer in groups[number]]
        return Rollouts(
            questions=questions[whole].repeat_interleave(group, dim=0),
            answers=torch.tensor([answer.tokens for answer in kept]),
            logprobs=torch.tensor([answer.logprobs for answer in kept]),
            versions=[answer.version for answer in kept],
            group=group,
        )

    def slowest_version(self) -> int:
        return min(map(self._version, self._clients))


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logprobs: list[float]
    version: int
    complete: bool

    @classmethod
    def read(cls, output: dict[str, Any]) -> Answer:
        facts = output["meta_info"]
        return cls(
            tokens=output["output_ids"],
            logprobs=[logprob for logprob, *_ in facts["output_token_logprobs"]],
            version=version_of(facts["weight_version"]),
            complete=facts["finish_reason"]["type"] == "length",
        )


def _generate(client: httpx.Client, questions: torch.Tensor, group: int) -> list[Answer]:
    sampling = {"max_new_tokens": DIGITS, "temperature": 1.0, "n": group}
    request = {
        "sampling_params": sampling,
        "return_logprob": True,
        "input_ids": prompts_of(questions).tolist(),
    }
    return [
        Answer.read(output) for output in client.post("/generate", json=request).raise_for_status().json()
    ]


def _version(client: httpx.Client) -> int:
    return version_of(client.get("/model_info").json()["weight_version"])


def version_of(label: str) -> int:
    """An engine that was not told a version yet serves the base."""
    return 0 if label == "default" else int(label)


Generate = Callable[[httpx.Client, torch.Tensor, int], list[Answer]]
"""questions int64 (questions, DIGITS) and answers per question to answers, those of a question together"""


class Trainer:
    """fp32 master weights and AdamW; what leaves it is bf16."""

    def __init__(self, model: CausalLM, rate: float) -> None:
        self.model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=0.0)

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


class Outbox:
    """The watched directory. `None` as directory: nothing leaves the trainer."""

    def __init__(self, directory: Path | None, channel: ObjectStore | None) -> None:
        self._directory = directory
        self._channel = channel

    def put(self, step: int, config: Config, weights: dict[str, torch.Tensor]) -> None:
        if self._directory is not None:
            checkpoint.save(self._directory / f"step_{step:06}", config, weights)

    def newest_version(self) -> int:
        """The version that the newest export has or is going to have."""
        waiting = 0 if self._directory is None else len(list(self._directory.glob("step_*")))
        return waiting + (0 if self._channel is None else pointer(self._channel))


@dataclass(frozen=True)
class Plan:
    steps: int
    seed: int
    questions: int
    group: int
    rate: float
    max_lead: int
    """versions ahead of the slowest engine"""
    lead_seconds: float = 120.0
    """how long the engines may take to come within that"""


def train(
    plan: Plan, trainer: Trainer, fleet: Fleet, outbox: Outbox, metrics: Path
) -> dict[str, torch.Tensor]:
    """Rollouts for the next step are sampled while this one is trained. Returns the last export."""
    random = torch.Generator().manual_seed(plan.seed + 1)
    weights = trainer.export()
    with ThreadPoolExecutor(1) as ahead:
        coming = ahead.submit(fleet.rollouts, random_questions(plan.questions, random), plan.group)
        for step in range(1, plan.steps + 1):
            rollouts = coming.result()
            if step < plan.steps:
                coming = ahead.submit(fleet.rollouts, random_questions(plan.questions, random), plan.group)
            newest = outbox.newest_version()
            trainer.step(rollouts)
            before, weights = weights, trainer.export()
            outbox.put(step, trainer.model.config, weights)
            _note(metrics, step, rollouts, newest, checkpoint.changed_share(before, weights))
            _bound_lead(outbox, fleet, plan)
    return weights


def _bound_lead(outbox: Outbox, fleet: Fleet, plan: Plan) -> None:
    what = f"engines within {plan.max_lead} versions of the trainer"
    wait_until(
        lambda: outbox.newest_version() - fleet.slowest_version() <= plan.max_lead, what, plan.lead_seconds
    )


def _note(metrics: Path, step: int, rollouts: Rollouts, newest: int, density: float) -> None:
    facts = {
        "time": time.time(),
        "step": step,
        "rewards": [round(reward, 5) for reward in rollouts.rewards.mean(1).tolist()],
        "versions": dict(sorted(Counter(rollouts.versions).items())),
        "lags": dict(sorted(Counter(newest - version for version in rollouts.versions).items())),
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
        return Fleet(options.engine)
    from examples import vllm

    return Fleet(options.engine, 600.0, generate=vllm.generate, version=vllm.slowest_version)


def run(options: argparse.Namespace) -> None:
    plan = Plan(options.steps, options.seed, options.questions, options.group, options.rate, options.max_lead)
    model = CausalLM(checkpoint.load_config(options.dir / "base"))
    model.load_state_dict(load_file(options.dir / MASTERS))
    fleet = _fleet(options)
    channel = None if options.channel is None else open_channel(options.channel)
    outbox = Outbox(None if options.freeze else options.watch, channel)
    try:
        weights = train(plan, Trainer(model, plan.rate), fleet, outbox, options.dir / "metrics.jsonl")
    finally:
        fleet.close()
    checkpoint.save(options.dir / "last", model.config, weights)


def main() -> None:
    parser = argparse.ArgumentParser(description="Trains the example model with RL.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    first = verbs.add_parser("prepare", help="warm-start a model and write the base checkpoint")
    first.add_argument("--warm-steps", type=int, default=120)
    second = verbs.add_parser("run", help="improve it with RL")
    second.add_argument("--engine", action="append", required=True, help="URL; several times")
    second.add_argument("--dialect", choices=("sglang", "vllm"), default="sglang", help="of the engines")
    second.add_argument(
        "--watch", type=Path, required=True, help="directory that receives a checkpoint per step"
    )
    second.add_argument("--channel", help="whose pointer names the newest published version")
    second.add_argument("--steps", type=int, default=32)
    second.add_argument("--questions", type=int, default=24, help="per step")
    second.add_argument("--group", type=int, default=16, help="answers per question")
    second.add_argument("--rate", type=float, default=1.5e-5, help="AdamW's learning rate")
    second.add_argument("--max-lead", type=int, default=3, help="versions ahead of the slowest engine")
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
