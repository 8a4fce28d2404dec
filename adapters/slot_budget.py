"""What can never fit: a selection beside the pins, a pin beside what was accepted."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loraplex.adapters.errors import NeverFitsError
from loraplex.adapters.ref import AdapterRef, LoraSelection


def check_selection(selection: LoraSelection, pinned: Collection[AdapterRef], *, num_slots: int) -> None:
    """Raise NeverFitsError when the parts that are not pinned need more slots than the pins leave in a space."""
    for space, needed, left in _demands(selection, pinned, num_slots):
        if needed > left:
            raise NeverFitsError(
                f"the adapters need {needed} {space} slots, and {left} of this server's {num_slots} are not pinned; "
                "use fewer or smaller adapters, unpin one, or start the server with more --adapter-slots",
                param="lora",
            )


def check_pin(
    ref: AdapterRef, pinned: Collection[AdapterRef], accepted: Iterable[LoraSelection], *, num_slots: int
) -> None:
    """Raise NeverFitsError when pinning `ref` leaves no slot in a space, or no room for an accepted request."""
    after = [*pinned, ref]
    for space, needed, total in (
        ("attention", ref.num_attention_slots, sum(other.num_attention_slots for other in after)),
        ("MLP", ref.num_mlp_slots, sum(other.num_mlp_slots for other in after)),
    ):
        if needed and total >= num_slots:
            raise NeverFitsError(
                f"this pin would leave no free {space} slot: {total} of {num_slots} would be pinned; "
                "unpin another version, or start the server with more --adapter-slots"
            )
    for selection in accepted:
        if any(needed > left for _, needed, left in _demands(selection, after, num_slots)):
            raise NeverFitsError(
                "requests that were already accepted would no longer fit; pin again when they are done"
            )


def _demands(
    selection: LoraSelection, pinned: Collection[AdapterRef], num_slots: int
) -> tuple[tuple[str, int, int], ...]:
    """Of each space: its name, the slots that the selection needs beside the pins, the slots not pinned."""
    pinned_digests = {ref.digest for ref in pinned}
    others = [ref for ref in selection.refs if ref.digest not in pinned_digests]
    return (
        (
            "attention",
            sum(ref.num_attention_slots for ref in others),
            num_slots - sum(ref.num_attention_slots for ref in pinned),
        ),
        ("MLP", sum(ref.num_mlp_slots for ref in others), num_slots - sum(ref.num_mlp_slots for ref in pinned)),
    )
