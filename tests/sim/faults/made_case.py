"""Small jobs for tests of the fault simulations; times in seconds."""

from typing import Any

from megascale_jax.config.cluster import ClusterConfig
from megascale_jax.config.fleet import Fleet
from megascale_jax.sim.faults.case import Case, CheckpointCosts, case_of

KIND = {"failures_per_1000_node_days": 100.0, "shows": "exit", "heals": 0.0, "found": 1.0, "detect_s": 10.0, "source": "made"}
RECOVERY = {
    "suspend_s": 5.0,
    "diagnose_s": 30.0,
    "replace_s": 7.0,
    "init_s": {"8": 60.0},
    "load_s": 20.0,
    "compile_s": 11.0,
    "reboot_s": 300.0,
    "spare_supply_s": 7200.0,
    "operator_s": 1800.0,
    "source": "made",
}
CHECKPOINT = {"blocking_s": 3.0, "host_copy_gbps": 25.0, "storage_write_gbps": 10.0, "storage_read_gbps": 10.0, "source": "made"}
SLOW = {"share": 0.2, "excess": 0.1, "step_cost": 0.05, "source": "made"}


def made_fleet(kinds: dict[str, dict[str, Any]] | None = None, **sections: Any) -> Fleet:
    """``kinds``: what differs from `KIND`, by name; the other sections: what differs, or all of them."""
    kinds = {"gpu": {}} if kinds is None else kinds
    document = {
        "description": "made",
        "kinds": {name: KIND | changed for name, changed in kinds.items()},
        "correlated": sections.get("correlated", {}),
        "slow_nodes": sections.get("slow_nodes"),
        "recovery": RECOVERY | sections.get("recovery", {}),
        "checkpoint": CHECKPOINT,
    }
    return Fleet.model_validate(document, strict=False)


def made_case(
    kinds: dict[str, dict[str, Any]] | None = None,
    *,
    nodes: int = 8,
    spares: int = 2,
    interval_s: float = 600.0,
    blocking_s: float = 3.0,
    upload_s: float = 40.0,
    copy_s: float | None = None,
    cluster: ClusterConfig | None = None,
    **sections: Any,
) -> Case:
    return case_of(
        made_fleet(kinds, **sections),
        cluster or ClusterConfig(),
        nodes=nodes,
        gpus_per_node=8,
        spares=spares,
        step_s=2.0,
        costs=CheckpointCosts(interval_s, blocking_s, upload_s, copy_s),
        load_s=sections.get("recovery", RECOVERY).get("load_s", 20.0),
        digest_every=100,
    )
