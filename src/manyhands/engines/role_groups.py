"""Groups that only their members make: the others go on with what they do."""

from __future__ import annotations

from collections.abc import Sequence

from manyhands.engines.group import Group


def group_among(group: Group, ranks: Sequence[int], name: str) -> Group:
    """Collectives among `ranks` of a group. Each of them calls it with the same name, nobody else.

    WHY not `subgroup`: that one lets all workers compare their wishes, for which all must come; an
    actor that was started again, or acts already, would have to.
    """
    members = sorted(set(ranks))
    if members == list(range(group.size)):
        return group
    return Group(group.transport.split_off(members, name), debug=group.debug)
