"""One of several ranks in an attempt: what it sends, receives and writes. The same for rank 0 and the others,
who differ in what they wait for before and after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from weightcast.publisher.publish.draft import PartWriter
from weightcast.publisher.publish.publish_job import Input, PublishJob
from weightcast.publisher.ranks import rendezvous
from weightcast.publisher.ranks.messages import Sent
from weightcast.publisher.ranks.rendezvous import Attempt, RankPart
from weightcast.publisher.ranks.shard_assignment import Holds, ShardAssignment, assign_shards
from weightcast.publisher.ranks.shards import FromRank, Merged, RankWeights, runs_in, send, senders
from weightcast.publisher.weights.shard_spec import Box
from weightcast.shared.base.elements import Part, TensorTable
from weightcast.shared.base.errors import Refused
from weightcast.shared.channel.index import STEP_ENCODINGS
from weightcast.shared.channel.store import Store


@dataclass(frozen=True)
class Meeting:
    """An attempt in which every rank knows what all hold. `deadline`: on the monotonic clock, for what other
    ranks send."""

    files: Store
    attempt: Attempt
    writer: PartWriter
    given: Input
    own: RankWeights
    assignment: ShardAssignment
    deadline: float

    @classmethod
    def of(
        cls,
        files: Store,
        attempt: Attempt,
        writer: PartWriter,
        given: Input,
        own: RankWeights,
        holds: Sequence[Holds],
        deadline: float,
    ) -> Meeting:
        """`files`: of the attempt; `holds`: of all ranks. Raises Refused where they do not make the model."""
        # slime's encodings have one payload per tensor: each tensor has one writer
        whole = attempt.encoding not in STEP_ENCODINGS
        assignment = assign_shards(own.local.table, holds, given.matched.frozen, whole=whole)
        return cls(files, attempt, writer, given, own, assignment, deadline)

    def write_part(self, job: PublishJob) -> RankPart:
        """Sends, receives and writes."""
        table, rank = self.own.local.table, self.own.rank
        with job.phase("exchange"):
            sent = self._send()
        part = Part(0, self.assignment.parts[rank].segments)
        mine, given, merged = self.assignment.answers[rank], self.given, None
        if all(mine.get(one.tensor) == Box.whole(table[one.tensor].shape) for one in part.segments):
            # this rank holds all that it writes: tensors on a device are compared there
            sources = {one.tensor: self.own.names[one.tensor] for one in part.segments}
            given = replace(given, matched=replace(given.matched, sources=sources))
        else:
            with job.phase("ranks"):
                merged = Merged(self.own, runs_in(table, mine), self._received())
        with job.phase("diff"):
            written = self.writer.write(given, part, job.advance, merged)
        return replace(written, sent=sent)

    def _send(self) -> Sent:
        own, files = self.own, self.files
        shares = send(own, self.assignment, files, self.writer.options.threads)
        doubled = sorted(self.assignment.doubled(own.rank))
        sent = Sent(shares, {n: own.digest(n, own.weights.box(own.names[n])) for n in doubled})
        rendezvous.leave_sent(files, own.rank, sent)
        return sent

    def _received(self) -> list[FromRank]:
        table, files = self.own.local.table, self.files
        ranks = senders(self.assignment, table, self.own.rank)
        sent = rendezvous.collect_sent(files, self.attempt, ranks, self.deadline)
        return [
            FromRank(rank, runs_in(table, self.assignment.answers[rank]), sent[rank], files) for rank in ranks
        ]


def check_doubles(assignment: ShardAssignment, table: TensorTable, parts: Sequence[RankPart]) -> None:
    """`parts`: by rank. Raises Refused, naming tensor and ranks, where ranks hold the same piece with other
    bytes."""
    for tensor, groups in sorted(assignment.doubles.items()):
        for ranks in groups:
            digests = [parts[rank].sent.digests.get(tensor) for rank in ranks]
            if len(set(digests)) > 1 or None in digests:
                other = ranks[next(n for n, digest in enumerate(digests) if digest != digests[0])]
                raise Refused(
                    f"{table[tensor].name} has other values on rank {ranks[0]} than on rank {other}",
                    remedy="make replicas and tied tensors equal before you publish them",
                )
