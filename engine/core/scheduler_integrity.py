"""Faults in the scheduler's tables; tests look for them after every step, operators through the integrity call."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from loraplex.engine.core.slot_leases import SlotLeases
from loraplex.engine.request import Request, RequestStatus

_LEASED = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_ADAPTER)


def check_places(
    requests: Collection[Request], *, running: Iterable[Request], waiting: Iterable[Request], held: Iterable[Request]
) -> list[str]:
    """Every accepted request stands in exactly one place, and only those that run have blocks."""
    running_ids = {request.request_id for request in running}
    places = sorted([*running_ids, *(r.request_id for r in waiting), *(r.request_id for r in held)])
    accepted = sorted(request.request_id for request in requests)
    faults = [] if places == accepted else [f"accepted are {accepted}, in the tables are {places}"]
    for request in requests:
        runs = request.request_id in running_ids
        if (request.status is RequestStatus.RUNNING) != runs or bool(request.block_ids) != runs:
            faults.append(
                f"request {request.request_id} is {request.status.name} with {len(request.block_ids)} blocks and is "
                f"{'' if runs else 'not '}in the running table"
            )
    return faults


def check_leases(requests: Iterable[Request], leases: SlotLeases) -> list[str]:
    """RUNNING and WAITING_FOR_ADAPTER requests hold leases, and nobody else."""
    requests = list(requests)
    holders = {request.request_id for request in leases}
    entitled = {r.request_id for r in requests if r.status in _LEASED and not r.selection.is_base}
    return [
        f"request {request_id} {'holds a lease that it may not' if request_id in holders else 'lacks its lease'}"
        for request_id in sorted(holders ^ entitled)
    ]
