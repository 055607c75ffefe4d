"""What a file may contain, as JSON Schema (2020-12), from the very structs that it is read into: for editors and other checkers.

It knows keys, types and the names of policies. What values must satisfy together is said when the file is read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from policies.batching.registry import DISCIPLINES
from policies.graphs import GRAPH_DEADLINES
from policies.placement.registry import PLACEMENTS
from profiles.interference import INTERFERENCE_NAMES
from roles.config.sections import document_schema

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_ARRIVALS: Final = ("poisson", "gamma", "uniform", "trace")


def json_schema() -> dict[str, Any]:
    """The whole schema."""
    found = document_schema()
    definitions = found["$defs"]
    document, cluster = definitions["Document"]["properties"], definitions["ClusterSection"]["properties"]
    for where, key, names in (
        (document, "batching", tuple(DISCIPLINES)),
        (document, "placement", tuple(PLACEMENTS)),
        (document, "graph_deadlines", tuple(GRAPH_DEADLINES)),
        (cluster, "interference", INTERFERENCE_NAMES),
    ):
        where[key] = _policy(where[key], names)
    definitions["ArrivalSection"]["properties"]["process"]["enum"] = list(_ARRIVALS)
    return {"$schema": DIALECT, "title": "Tenuto's cluster file", **found}


def _policy(former: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """A name, or one name with its options."""
    with_options = {
        "type": "object",
        "propertyNames": {"enum": list(names)},
        "minProperties": 1,
        "maxProperties": 1,
        "additionalProperties": {"anyOf": [{"type": "object"}, {"type": "null"}]},
    }
    return {"anyOf": [{"enum": list(names)}, with_options], "default": former["default"]}
