"""Holds a RayJob manifest to KubeRay's schema, without a cluster, and prints what each pod would run.

    python environment/clusters/kuberay.py [MANIFEST]              # exit code 1, and a line for each fault
    python environment/clusters/kuberay.py --take CRD.yaml v1.7.0  # renew kuberay_schema.json

kuberay_schema.json is the part of config/crd/bases/ray.io_rayjobs.yaml that the manifest touches: every
field's name and type wherever the manifest has an object, so that a misspelt field is found, which Kubernetes
would drop or refuse.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import jsonschema
import yaml

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parents[1]))  # the project, where it is not installed

from helpers.nodes import node_environment
from helpers.profiles import load_profile

MANIFEST, SCHEMA = HERE / "kuberay.yaml", HERE / "kuberay_schema.json"
KEPT = (
    "type",
    "enum",
    "required",
    "minimum",
    "maximum",
    "x-kubernetes-int-or-string",
    "additionalProperties",
)


def documents(path: Path) -> list[dict]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def ray_job(path: Path) -> dict:
    """The manifest's RayJob. Raises ValueError where there is none, or more than one."""
    found = [d for d in documents(path) if d.get("kind") == "RayJob"]
    if len(found) != 1:
        raise ValueError(f"{path.name} holds {len(found)} documents of kind RayJob; it has to be one")
    return found[0]


# --- the schema ---------------------------------------------------------------------------------------------
def pruned(schema: dict, example) -> dict:
    """`schema` as JSON Schema, without what lies below fields that the example leaves out."""
    kept = {
        key: schema[key] for key in KEPT if key in schema and isinstance(schema[key], (str, int, list, bool))
    }
    if "properties" in schema:
        known = schema["properties"]
        within = example if isinstance(example, dict) else {}
        kept["properties"] = {
            name: pruned(part, within[name]) if name in within else _name_and_type(part)
            for name, part in known.items()
        }
        kept["additionalProperties"] = False
    elif "items" in schema and isinstance(example, list) and example:
        merged = {key: value for item in example if isinstance(item, dict) for key, value in item.items()}
        kept["items"] = pruned(schema["items"], merged or example[0])
    elif isinstance(schema.get("additionalProperties"), dict):
        kept["additionalProperties"] = _name_and_type(schema["additionalProperties"])
    return _without_type(kept) if kept.pop("x-kubernetes-int-or-string", False) else kept


def _name_and_type(schema: dict) -> dict:
    return (
        {}
        if schema.get("x-kubernetes-int-or-string")
        else {k: schema[k] for k in ("type", "enum") if k in schema}
    )


def _without_type(schema: dict) -> dict:
    return {key: value for key, value in schema.items() if key != "type"} | {"type": ["integer", "string"]}


def take(crd: Path, version: str) -> None:
    """Write kuberay_schema.json from KubeRay's CRD."""
    versions = yaml.safe_load(crd.read_text())["spec"]["versions"]
    full = next(v for v in versions if v["name"] == "v1")["schema"]["openAPIV3Schema"]
    part = pruned(full, ray_job(MANIFEST))
    part["properties"]["metadata"] = {"type": "object"}
    text = {
        "source": f"ray-project/kuberay {version}, ray-operator/config/crd/bases/{crd.name}",
        "schema": part,
    }
    SCHEMA.write_text(json.dumps(text, indent=1) + "\n")


# --- the check ----------------------------------------------------------------------------------------------
def faults(path: Path) -> Iterator[str]:
    """What is wrong with the manifest, a line each."""
    job = ray_job(path)
    validator = jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())["schema"])
    errors = list(validator.iter_errors(job))
    if errors:  # what follows reads the fields
        yield from (f"{'.'.join(map(str, e.absolute_path)) or 'RayJob'}: {e.message}" for e in errors)
        return
    cluster = job.get("spec", {}).get("rayClusterSpec", {})
    if cluster.get("authOptions", {}).get("mode") != "token":
        yield "spec.rayClusterSpec.authOptions.mode is not token: whoever reaches a pod could run code there"
    locked = re.search(r"^ray==(\S+)", (HERE.parent / "gpu.lock").read_text(), re.MULTILINE)[1]
    if cluster.get("rayVersion") != locked:
        yield f"spec.rayClusterSpec.rayVersion is {cluster.get('rayVersion')}, and environment/gpu.lock has ray {locked}"
    claims = {d["metadata"]["name"] for d in documents(path) if d.get("kind") == "PersistentVolumeClaim"}
    for role, spec in pods(job):
        yield from (f"{role}: {fault}" for fault in _pod_faults(spec, profile_of(job), claims))


def _pod_faults(spec: dict, profile: str, claims: set[str]) -> Iterator[str]:
    containers, volumes = spec.get("containers", []), {v["name"]: v for v in spec.get("volumes", [])}
    for volume in volumes.values():
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in claims:
            yield f"volume {volume['name']} wants the claim {claim}, which the manifest does not make"
    for container in containers:
        told = {entry["name"]: entry.get("value") for entry in container.get("env", [])}
        wanted = node_environment(load_profile(profile))
        for name in sorted(wanted.keys() | {n for n in told if n.startswith(("RAY_", "GRPO_"))}):
            if told.get(name) != wanted.get(name):
                yield f"{name} is {told.get(name)!r}; profile {profile} says {wanted.get(name)!r} (helpers/nodes.py)"
        if {"RAY_AUTH_TOKEN", "HF_TOKEN"} & {name for name, value in told.items() if value}:
            yield "a token stands in the manifest; use a Secret (env.valueFrom.secretKeyRef)"
        for mount in container.get("volumeMounts", []):
            if mount["name"] not in volumes:
                yield f"volumeMount {mount['name']} has no volume"
        paths = {mount["mountPath"] for mount in container.get("volumeMounts", [])}
        if "/dev/shm" not in paths:
            yield "nothing is mounted at /dev/shm: Kubernetes gives 64 MB, and Ray and NCCL need more"


def pods(job: dict) -> Iterator[tuple[str, dict]]:
    """(role, pod spec) of the head and of each worker group."""
    cluster = job.get("spec", {}).get("rayClusterSpec", {})
    groups = [("head", cluster.get("headGroupSpec", {}))]
    groups += [
        (f"workers {g.get('groupName')} x {g.get('replicas')}", g)
        for g in cluster.get("workerGroupSpecs", [])
    ]
    for role, group in groups:
        yield role, group.get("template", {}).get("spec", {})


def profile_of(job: dict) -> str:
    found = re.search(r"--profile[ =](\S+)", job.get("spec", {}).get("entrypoint", ""))
    return found[1] if found else "cpu"


def summary(job: dict) -> Iterator[str]:
    """What would run where, a line each."""
    for role, spec in pods(job):
        for container in spec.get("containers", []):
            start = "ray start --head" if role == "head" else "ray start --address=<the head's service>"
            limits = ", ".join(
                f"{k} {v}" for k, v in container.get("resources", {}).get("limits", {}).items()
            )
            yield f"{role}: image {container.get('image')}, {limits}: {start} (KubeRay adds its ports)"
    yield f"submitted once the cluster is up: {job['spec']['entrypoint']}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("manifest", nargs="?", type=Path, default=MANIFEST)
    parser.add_argument("--take", nargs=2, metavar=("CRD", "VERSION"))
    args = parser.parse_args(argv)
    if args.take:
        take(Path(args.take[0]), args.take[1])
        return 0
    try:
        found = list(faults(args.manifest))
        print("\n".join(found or summary(ray_job(args.manifest))), file=sys.stderr if found else sys.stdout)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, yaml.YAMLError) as error:
        print(f"{args.manifest} is no RayJob manifest: {' '.join(str(error).split())[:300]}", file=sys.stderr)
        return 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
