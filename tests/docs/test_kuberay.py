"""The KubeRay manifest fits the recipe that it runs, and the Ray that is installed."""

import os
import re

import pipeline
import ray
import yaml


def test_the_manifests_cluster_is_that_of_its_recipe():
    job = yaml.safe_load((pipeline.REPOSITORY / "examples/kuberay/rayjob.yaml").read_text())["spec"]
    cluster = job["rayClusterSpec"]
    assert cluster["rayVersion"] == ray.__version__
    num_nodes, recipe = re.search(r"NUM_NODES=(\d+) bash (scripts/\S+\.sh)", job["entrypoint"]).groups()
    assert 1 + sum(group["replicas"] for group in cluster["workerGroupSpecs"]) == int(num_nodes)
    printed = pipeline.run_script(os.path.basename(recipe), DRY_RUN="command", NUM_NODES=num_nodes).stdout
    (gpus,) = re.findall(r"--actor.num_gpus_per_node (\d+)", printed)
    templates = [cluster["headGroupSpec"]["template"], *(g["template"] for g in cluster["workerGroupSpecs"])]
    for template in templates:
        (container,) = template["spec"]["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == gpus
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            v["name"] for v in template["spec"]["volumes"]
        }
