"""One rank's turn in an attempt: what it holds, what it sends, what it writes. The same for rank 0 and the
others, who differ in what they wait for before and after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from weightcast.publisher.publish.publish_job import PartWriter, Work
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.messages import Sent, blobs_name
from weightcast.publisher.ranks.rendezvous import Attempt, Left
from weightcast.publisher.ranks.shard_assignment import Division, Holds, divide
from weightcast.publisher.ranks.shards import FromRank, Merged, Own, runs_in, send, senders
from weightcast.publisher.weights.match import Matched
from weightcast.publisher.weights.shard_spec import Box
from weightcast.publisher.weights.tensors import NewWeights
from weightcast.shared.base.elements import Part, TensorTable
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.index import STEP_ENCODINGS
from weightcast.shared.checkpoint.local_checkpoint import LocalCheckpoint


def given_names(weights: NewWeights, matched: Matched, table: TensorTable) -> Mapping[int, str]:
    """Tensor number to the name this rank gives it by: its own, or that of a tensor tied to it. Raises
    Refused when it gives different pieces of tied tensors."""
    names = {number: name for name, number in matched.ties} | dict(matched.sources)
    for name, number in matched.ties:
        if weights.box(name) != weights.box(names[number]):
            raise Refused(
                f"{name} is tied to {table[number].name}, and this rank holds other pieces of it",
                remedy="shard tied tensors alike, or give only one of them",
            )
    return names


def holds_of(weights: NewWeights, names: Mapping[int, str]) -> Holds:
    return {number: weights.box(name) for number, name in names.items()}


def division_of(
    attempt: Attempt, table: TensorTable, holds: Sequence[Holds], frozen: frozenset[int]
) -> Division:
    """The field's encodings have one payload per tensor: each tensor is one writer's. Raises Refused."""
    return divide(table, holds, frozen, whole=attempt.encoding not in STEP_ENCODINGS)


@dataclass(frozen=True)
class Turn:
    """`deadline`: on the monotonic clock, for what other ranks send."""

    writer: PartWriter
    attempt: Attempt
    deadline: float

    @property
    def _local(self) -> LocalCheckpoint:
        return self.writer.local

    @property
    def _rank(self) -> int:
        return self.writer.rank.number

    @property
    def _directory(self) -> Path:
        return self.writer.directory

    def take(
        self,
        weights: NewWeights,
        matched: Matched,
        names: Mapping[int, str],
        division: Division,
        work: Work,
    ) -> Left:
        """Sends, receives and writes."""
        own = Own(self._rank, self._local, weights, names)
        with work.phase("exchange"):
            sent = self._send(own, division)
        part = Part(0, division.parts[self._rank].segments)
        mine = division.answers[self._rank]
        if self._alone(part, mine):
            matched = replace(matched, sources={one.tensor: names[one.tensor] for one in part.segments})
            merged = None
        else:
            with work.phase("ranks"):
                merged = Merged(own, runs_in(self._local.table, mine), self._received(division))
        with work.phase("diff"):
            written = self.writer.write(weights, matched, part, work.advance, merged)
        work.non_finite = written.non_finite
        return Left(written.draft, written.sums, sent)

    def _alone(self, part: Part, mine: Mapping[int, Box]) -> bool:
        """Whether all that is written is this rank's own: then tensors on a device are compared there."""
        table = self._local.table
        return all(mine.get(one.tensor) == Box.whole(table[one.tensor].shape) for one in part.segments)

    def _send(self, own: Own, division: Division) -> Sent:
        shares = send(own, division, self._directory, self.writer.threads)
        digests = {
            tensor: own.digest(tensor, own.weights.box(own.names[tensor]))
            for tensor in sorted(division.doubled(self._rank))
        }
        sent = Sent(shares, digests)
        rendezvous.leave_sent(self._directory, self._rank, sent)
        return sent

    def _received(self, division: Division) -> list[FromRank]:
        table = self._local.table
        ranks = senders(division, table, self._rank)
        sent = rendezvous.collect_sent(self._directory, self.attempt, ranks, self.deadline)
        return [
            FromRank(
                rank, runs_in(table, division.answers[rank]), sent[rank], self._directory / blobs_name(rank)
            )
            for rank in ranks
        ]


def check_doubles(division: Division, table: TensorTable, left: Sequence[Left]) -> None:
    """`left`: by rank. What several ranks hold must be the same bytes. Raises Refused that names tensor and
    ranks."""
    for tensor, groups in sorted(division.doubles.items()):
        for ranks in groups:
            digests = [left[rank].sent.digests.get(tensor) for rank in ranks]
            if len(set(digests)) > 1 or None in digests:
                other = ranks[next(n for n, digest in enumerate(digests) if digest != digests[0])]
                raise Refused(
                    f"{table[tensor].name} has other values on rank {ranks[0]} than on rank {other}",
                    remedy="replicas and tied tensors must be equal when they are published",
                )
