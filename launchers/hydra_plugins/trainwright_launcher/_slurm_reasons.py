"""Slurm's one-word reasons, in words and with what helps."""

import re

# Reason: what it means; what to do. Source: man squeue, JOB REASON CODES (Slurm 22.05). {id} is the job.
_WORDS: dict[str, tuple[str, str | None]] = {
    "Priority": ("jobs of higher priority come first", "squeue --start -j {id} estimates when it starts"),
    "Resources": ("no nodes are free for it", "squeue --start -j {id} estimates when it starts"),
    "Dependency": ("it waits for the jobs before it", None),
    "DependencyNeverSatisfied": (
        "the job before it did not succeed, so it can never start",
        "mend that one, then `trainwright retry` goes on there",
    ),
    "BeginTime": ("its start time has not come; after a requeue Slurm waits for about two minutes", None),
    "JobHeldUser": ("it is held", "scontrol release {id}"),
    "JobHeldAdmin": ("an administrator holds it", "ask them"),
    "JobHoldMaxRequeue": ("it was requeued more often than the cluster allows", "scontrol release {id}"),
    "launch failed requeued held": ("it could not be started on its node and is held", "scontrol release {id}"),
    "PartitionConfig": (
        "the partition has no such nodes: too many of them, or too many cores or too much memory on each",
        "lower hardware.num_nodes, launcher.cpus_per_task or launcher.mem, or change launcher.partition",
    ),
    "PartitionNodeLimit": (
        "it asks for more nodes than the partition allows, or for nodes that are down",
        "lower hardware.num_nodes or change launcher.partition",
    ),
    "PartitionTimeLimit": (
        "launcher.time is more than the partition allows",
        "lower launcher.time or change launcher.partition; sinfo shows the limits",
    ),
    "PartitionDown": ("the partition is down", "change launcher.partition or wait; sinfo shows its state"),
    "PartitionInactive": ("the partition takes no jobs", "change launcher.partition; sinfo shows its state"),
    "ReqNodeNotAvail": (
        "nodes that it needs are down, drained or reserved",
        "change launcher.nodelist or launcher.partition; sinfo -R shows why",
    ),
    "NodeDown": ("a node that it needs is down", "wait, or scancel {id} and start again; sinfo -R shows why"),
    "BadConstraints": ("no node satisfies what it asks for", "change launcher.constraint, gres, mem or nodelist"),
    "Reservation": ("its reservation has not begun", "wait, or change launcher.reservation"),
    "ReservationDeleted": ("its reservation is gone", "change launcher.reservation"),
    "Licenses": ("it waits for a license", None),
    "InvalidAccount": ("launcher.account does not exist", "sacctmgr show associations user=$USER lists yours"),
    "InvalidQOS": ("launcher.qos does not exist or is not yours", "sacctmgr show qos lists them"),
    "AccountNotAllowed": ("launcher.account may not use the partition", "change launcher.account or partition"),
    "QOSNotAllowed": ("launcher.qos may not use the partition", "change launcher.qos or launcher.partition"),
    "BurstBufferResources": ("no burst buffer is free", None),
    "Prolog": ("the nodes are being prepared", None),
    "Cleaning": ("Slurm is cleaning up after its last run", None),
    "TimeLimit": ("it ran into launcher.time", "raise launcher.time or start it again with run_id=..."),
    "OutOfMemory": ("it ran out of memory", "raise launcher.mem or lower data.micro_batch_size"),
    "NonZeroExitCode": ("its script ended with an error", None),
}
_FAMILIES = (
    (r"QOS.*Limit$", "a limit of launcher.qos is reached", "wait for other jobs to end, or change launcher.qos"),
    (r"Assoc.*Limit$", "a limit of launcher.account is reached", "wait for other jobs to end, or change the account"),
    (r"Max.*PerAccount$", "launcher.account has as many as it may", "wait for other jobs to end"),
)


def in_words(reason: str, job_id: str) -> str:
    """Return `REASON: what it means; what to do`. What is not in the table stays as Slurm says it."""
    word = re.split(r"[,(]", reason)[0].strip()  # "ReqNodeNotAvail, UnavailableNodes:n2"
    meaning, remedy = _WORDS.get(word, (None, None))
    for pattern, family, help_ in _FAMILIES:
        if meaning is None and re.match(pattern, word):
            meaning, remedy = family, help_
    if meaning is None:
        return f"{reason}; man squeue explains it under JOB REASON CODES"
    return f"{reason}: {meaning}" + (f"; {remedy.format(id=job_id)}" if remedy else "")
