"""Kubeflow Trainer v2: the file of `finetune launch --on kubeflow`, as `kubectl apply` takes it.

A TrainJob may not change how its pods are restarted: `torch-distributed`, the runtime that a cluster comes with, starts
a bad recipe again six times. So the file has a TrainingRuntime of its own, which is `torch-distributed` with restarts
by exit code, a volume and shared memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from finetune.errors import DoesNotFit, EnvironmentMismatch, FinetuneError, Stopped
from finetune.launch.plan import LaunchPlan
from finetune.launch.signals import GRACE_VARIABLE
from finetune.output_stream import printable
from finetune.paths import read_regular
from finetune.recipe.storage_address import OBJECT_STORES
from finetune.recipe.yaml_text import MAX_BYTES

_GRACE_SECONDS = 600  # from SIGTERM to SIGKILL: for one optimizer step and one checkpoint
_RESTARTS = 6  # after crashes, for each node
_LONGEST_NAME = 40  # of 63 letters of a pod's name: JobSet adds -node-0-0-abcde
_NO_SECOND_TRY = [FinetuneError.exit_code, DoesNotFit.exit_code, EnvironmentMismatch.exit_code]
_CLAIM = "finetune"  # the volume, if no other is named
_VERSION = "trainer.kubeflow.org/v1alpha1"


def train_job(plan: LaunchPlan, head: Sequence[str]) -> str:
    """The file's text: a ConfigMap with the recipe, if it is the user's own, a TrainingRuntime and a TrainJob.

    Args:
        head: Comments for its beginning.
    """
    name = re.sub(r"[^a-z0-9]+", "-", plan.loaded.path.stem.lower()).strip("-")
    if not name[:1].isalpha():
        name = f"run-{name}".strip("-")
    name = name[:_LONGEST_NAME].strip("-")
    documents: list[dict[str, Any]] = []
    recipe = plan.shipped_recipe
    if recipe is None:
        recipe = f"/recipe/{plan.loaded.path.name}"
        text = read_regular(plan.loaded.path, MAX_BYTES).decode()
        documents.append(
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": {"recipe.yaml": text}}
        )
    if plan.alone:
        command = ["tini", "--", "finetune", "train"]
    else:
        # It takes nodes, ranks and addresses from the PET_ variables of the runtime's torch policy.
        command = ["tini", "--", "python", "-m", "finetune.launch.torchrun", "-m", "finetune.train"]
    trainer: dict[str, Any] = {
        "numNodes": plan.nodes,
        "numProcPerNode": plan.ranks,
        # Kubernetes reads $(NAME) in a command as a variable, and $$ as a dollar.
        "command": [word.replace("$", "$$") for word in (*command, recipe, *plan.arguments)],
    }
    if plan.gpus:
        trainer["resourcesPerNode"] = {"limits": {"nvidia.com/gpu": plan.gpus}}
    runtime = {"apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": name}
    documents += [
        {
            "apiVersion": _VERSION,
            "kind": "TrainingRuntime",
            "metadata": {"name": name, "labels": {"trainer.kubeflow.org/framework": "torch"}},
            "spec": {"mlPolicy": {"numNodes": plan.nodes, "torch": {}}, "template": {"spec": _job_set(plan, name)}},
        },
        {
            "apiVersion": _VERSION,
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {"runtimeRef": runtime, "trainer": trainer},
        },
    ]
    claim = plan.options.claim or _CLAIM
    lines = [
        *head,
        "# Submit: kubectl apply -f THIS_FILE. Again after a failure: kubectl delete -f THIS_FILE, then submit it.",
        f"# It needs a PersistentVolumeClaim {claim}, mounted at /work. Paths are as seen from there.",
    ]
    if plan.nodes > 1:
        lines.append("# All machines write to that volume: its access mode is ReadWriteMany.")
    storage = plan.loaded.recipe.storage
    if storage is not None and storage.startswith(OBJECT_STORES):
        lines.append("# Its secret `storage` holds the credentials of run.storage, as AWS_ACCESS_KEY_ID and others.")
    if paths := sorted({path for _, path in plan.local_paths}):
        lines.append(f"# Copy to the volume: {', '.join(map(printable, paths))}")
    text = yaml.dump_all(documents, Dumper=_Writer, sort_keys=False, allow_unicode=True, width=2**20)
    return "\n".join(lines) + f"\n{text}"


def _job_set(plan: LaunchPlan, name: str) -> Mapping[str, Any]:
    """The runtime's JobSet: one job named `node`, whose pods are the machines."""
    mounts = [
        {"name": "work", "mountPath": "/work"},
        {"name": "work", "mountPath": "/cache", "subPath": "cache"},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "scratch", "mountPath": "/tmp"},
        {"name": "hugging-face", "mountPath": "/secrets", "readOnly": True},
    ]
    token = {"secretName": "hugging-face", "items": [{"key": "token", "path": "token"}], "optional": True}
    volumes: list[dict[str, Any]] = [
        {"name": "work", "persistentVolumeClaim": {"claimName": plan.options.claim or _CLAIM}},
        # NCCL on several GPUs needs more than a container's usual 64 MB.
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}},
        {"name": "scratch", "emptyDir": {"sizeLimit": "8Gi"}},
        {"name": "hugging-face", "secret": token},
    ]
    if plan.shipped_recipe is None:
        mounts.append({"name": "recipe", "mountPath": "/recipe", "readOnly": True})
        items = [{"key": "recipe.yaml", "path": plan.loaded.path.name}]
        volumes.append({"name": "recipe", "configMap": {"name": name, "items": items}})
    environment = {
        "HF_TOKEN_PATH": "/secrets/token",  # a file is in no child's environment
        "HOME": "/tmp",
        GRACE_VARIABLE: str(_GRACE_SECONDS),
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(_GRACE_SECONDS - 30),  # torchrun kills ranks that save for longer
        **plan.environment,
    }
    container: dict[str, Any] = {
        "name": "node",
        "image": plan.options.image,
        "workingDir": "/work",
        "env": [{"name": key, "value": value} for key, value in environment.items()],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    storage = plan.loaded.recipe.storage
    if storage is not None and storage.startswith(OBJECT_STORES):
        container["envFrom"] = [{"secretRef": {"name": "storage", "optional": True}}]
    pod = {
        "restartPolicy": "Never",  # podFailurePolicy needs this
        "terminationGracePeriodSeconds": _GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 1000,
            "fsGroup": 1000,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [container],
        "volumes": volumes,
    }
    codes = {"containerName": "node", "operator": "In"}
    rules = [
        {"action": "FailJob", "onExitCodes": {**codes, "values": _NO_SECOND_TRY}},
        {"action": "Ignore", "onExitCodes": {**codes, "values": [Stopped.exit_code]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    job = {
        # A crash ends the ranks on every node, so each counts.
        "backoffLimit": _RESTARTS * plan.nodes,
        "podFailurePolicy": {"rules": rules},
        "template": {"spec": pod},
    }
    label = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    return {"replicatedJobs": [{"name": "node", "template": {"metadata": {"labels": label}, "spec": job}}]}


class _Writer(yaml.SafeDumper):
    """Writes a page of text as one, and no anchors."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Writer.add_representer(str, _Writer.represent_text)
