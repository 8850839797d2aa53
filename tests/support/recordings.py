"""Reads the recordings of tests/support/recording/sitecustomize.py, and recomputes log-probs with transformers."""

import collections
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pipeline
import torch
from pyarrow import parquet

# Log-probs of the same weights in float32 differ by at most 1e-5, because of the order of sums. Those of the next
# version differ by 0.05 or more for half of the tokens.
CLOSE, APART = 1e-4, 1e-2


def environment(folder: Path, start: int = 0) -> dict[str, str]:
    """Environment variables of a run that is recorded in `folder`; its broadcasts are counted from `start`."""
    folder.mkdir()
    path = pipeline.python_path(pipeline.SUPPORT / "recording")
    return {"RECORDING": str(folder), "RECORDING_START": str(start), "PYTHONPATH": path}


def train(directory: Path, flags: list[str], **changes) -> tuple[list[dict], dict[str, torch.Tensor], "Policies"]:
    """Record a run; return the metrics of its steps, all samples that it trained on, and the policies of all versions.

    `changes` are additional environment variables.
    """
    folder = directory / "recording"
    steps = pipeline.steps(pipeline.train(directory, flags, "run", **environment(folder) | changes))
    return steps, trained_on(folder), Policies(directory / "model", folder)


def kill(directory: Path, flags: list[str], when: Callable[[Path], bool]) -> Path:
    """Record a run in the folder "killed", and kill it as soon as `when` is true of its log; return the log."""
    log, command = directory / "killed.log", [pipeline.warm_python(), *pipeline.TRAIN, *flags]
    with pipeline.running(command, log, **environment(directory / "killed")) as process:
        pipeline.wait_until(lambda: when(log), process, log)
        os.killpg(process.pid, signal.SIGKILL)
    return log


def metrics(output: str) -> list[dict[str, float]]:
    """Return the metrics of each step of a run's output but those that depend on the clock."""
    steps = pipeline.steps(output)
    for step in steps:  # vLLM's last bits follow from which requests it has together; nothing else is made of them
        step["offpolicy/engine_mismatch"] = round(step["offpolicy/engine_mismatch"], 5)
    return [{name: value for name, value in step.items() if not name.startswith("timing/")} for step in steps]


def trained_on(folder: Path, model: str = "actor") -> dict[str, torch.Tensor]:
    """All samples that a model was trained on, as one batch in the order of training, padded at the end.

    Beside the recorded tensors it has, both [samples], "version", the number of broadcasts before the training step,
    and "place", the number of micro-batches that the rank trained on since the last broadcast.
    """
    batches, places = [], collections.Counter()
    for path in sorted(folder.glob(f"{model}-*.pt")):
        version, rank, _ = map(int, path.stem.split("-")[1:])
        batch = torch.load(path)
        size = len(batch["sequences"])
        batch |= {"version": torch.full((size,), version), "place": torch.full((size,), places[version, rank])}
        places[version, rank] += 1
        batches.append(batch)
    width = max(batch["sequences"].shape[1] for batch in batches)

    def padded(tensor: torch.Tensor, batch: dict) -> torch.Tensor:
        missing = width - batch["sequences"].shape[1]
        return torch.nn.functional.pad(tensor, (0, missing)) if tensor.dim() == 2 else tensor

    return {name: torch.cat([padded(batch[name], batch) for batch in batches]) for name in batches[0]}


class Policies:
    """The policies of all versions: the initial model of a run, and the weights that it broadcast.

    Args:
        model: the model of version 0.
        folders: recordings; if two have weights of the same version, those of the later one count.
        temperature: the rollouts' temperature, which divides the logits.
    """

    def __init__(self, model: Path, *folders: Path, temperature: float = 1.0) -> None:
        from transformers import AutoModelForCausalLM

        self._temperature = temperature
        torch.set_num_threads(1)  # with small tensors a second thread only waits for busy cores
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        self._weights = {0: {name: weight.clone() for name, weight in self._model.state_dict().items()}}
        for folder in folders:
            for path in sorted(folder.glob("weights-*.pt")):
                self._weights[int(path.stem.split("-")[1])] = torch.load(path)

    @torch.no_grad()
    def log_probs(self, batch: dict[str, torch.Tensor], versions: torch.Tensor, sampled: bool) -> torch.Tensor:
        """log pi of every action token under its own version's weights, [samples, actions]; NaN elsewhere.

        Args:
            batch: from `trained_on`.
            versions: [samples, actions]; the result is NaN for versions that do not exist.
            sampled: whether to take the distribution that the engine sampled from, in which the first token cannot be
                EOS (min_tokens=1).
        """
        mask = batch["action_mask"] > 0
        found = torch.full(mask.shape, torch.nan)
        for version in self._weights.keys() & set(versions[mask].tolist()):
            self._model.load_state_dict(self._weights[version])
            chosen = mask & (versions == version)
            rows = chosen.any(-1)
            sequences, attention = batch["sequences"][rows], batch["attention_mask"][rows].long()
            positions = (attention.cumsum(-1) - 1).clamp(min=0)
            logits = self._model(sequences, attention_mask=attention, position_ids=positions).logits[:, :-1]
            if sampled:
                first = mask[rows] & (mask[rows].cumsum(-1) == 1)
                logits[..., pipeline.EOS] = logits[..., pipeline.EOS].masked_fill(first, -torch.inf)
            log_probs = (logits / self._temperature).log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)
            found[rows] = torch.where(chosen[rows], log_probs, found[rows])
        return found


def steps_by_version(batch: dict[str, torch.Tensor], num_first: int) -> dict[int, int]:
    """Optimizer steps after each version's broadcast, of `num_first` micro-batches per rank each."""
    last_places = collections.defaultdict(int)
    for version, place in zip(batch["version"].tolist(), batch["place"].tolist(), strict=True):
        last_places[version] = max(last_places[version], place)
    return {version: (place + 1) // num_first for version, place in last_places.items()}


def assert_optimizer_steps_are_counted(
    batch: dict[str, torch.Tensor], logged: list[dict], num_first: int, steps: dict[int, int]
) -> None:
    """Assert that `optimizer_steps` and its metrics count the steps from each token's weights to the current ones.

    Args:
        batch: from `trained_on`.
        logged: the run's metrics, a dict per training step.
        num_first: micro-batches of a rank in an optimizer step.
        steps: by version, from `steps_by_version`; of all versions in the batch.
    """
    mask, versions = batch["action_mask"] > 0, sorted(set(batch["version"].tolist()))
    before = torch.tensor([sum(steps[v] for v in range(version)) for version in range(versions[-1] + 1)])
    expected = before[batch["version"]][:, None] - before[batch["versions"].long()]
    assert torch.equal(batch["optimizer_steps"].long(), torch.where(mask, expected, 0))
    for version, metrics in zip(versions, logged, strict=True):
        rows = batch["version"] == version
        behind = (batch["optimizer_steps"] + (batch["place"] // num_first)[:, None])[rows][mask[rows]].double()
        assert metrics["offpolicy/optimizer_steps_taken"] == steps[version]
        assert metrics["offpolicy/optimizer_steps_max"] == behind.max()
        assert abs(metrics["offpolicy/optimizer_steps_mean"] - behind.mean()) < 1e-6


def assert_ratios_are_against_the_policy_that_generated(
    batch: dict[str, torch.Tensor], policies: Policies, sampled: bool, num_first: int
) -> None:
    """Assert that each denominator is of its token's own version only, and that the first update's ratios follow.

    Args:
        batch: from `trained_on`.
        policies: the policies of all versions in it.
        sampled: whether the expected denominators are the engine's, or the actor's own.
        num_first: micro-batches of a rank before the first optimizer step after a broadcast.
    """
    mask, version = batch["action_mask"] > 0, batch["version"][:, None]
    assert torch.equal(batch["staleness"].long(), torch.where(mask, version - batch["versions"], 0))

    def distance(shift: int) -> torch.Tensor:
        return (policies.log_probs(batch, batch["versions"] + shift, sampled) - batch["denominators"]).abs()[mask]

    assert distance(0).max() < CLOSE
    for shift in (-1, 1):
        assert distance(shift).nanmedian() > APART

    # The numerator is the current policy's, whose first token may be EOS.
    first = mask & (batch["place"] < num_first)[:, None]
    current = policies.log_probs(batch, version.expand_as(mask), sampled=False)
    assert (current - batch["log_probs"])[first].abs().max() < CLOSE
    log_ratio = (batch["log_probs"] - batch["denominators"]).abs()
    assert log_ratio[first & (batch["staleness"] > 0)].median() > APART


def assert_ratios_are_against_the_policy_that_training_started_from(
    batch: dict[str, torch.Tensor], policies: Policies, num_first: int, tapered: bool = False
) -> None:
    """Assert that each denominator is of the training step's version, and the engine's log-prob of the token's own.

    With tapered weights, the behavior policy's log-prob is the denominator where a token is fresh. Replayed tokens keep
    that of their rollout, so that for each response's first token either may be right.

    Args:
        batch: from `trained_on`; some tokens are stale.
        policies: the policies of all versions in it.
        num_first: micro-batches of a rank before the first optimizer step after a broadcast.
    """
    mask, version = batch["action_mask"] > 0, batch["version"][:, None].expand_as(batch["versions"])
    assert torch.equal(batch["staleness"].long(), torch.where(mask, version - batch["versions"], 0))
    for name, versions, sampled in (("denominators", version, False), ("rollout_log_probs", batch["versions"], True)):
        chosen = mask
        if tapered and name == "rollout_log_probs":
            chosen = (batch["staleness"] > 0) & (mask.cumsum(-1) > 1)
            fresh = mask & (batch["staleness"] == 0)
            assert torch.equal(batch[name][fresh], batch["denominators"][fresh])
        for shift in (-1, 0, 1):
            gap = (policies.log_probs(batch, versions + shift, sampled) - batch[name]).abs()[chosen]
            assert gap.nanmedian() > APART if shift else gap.max() < CLOSE, (name, shift)
    first = mask & (batch["place"] < num_first)[:, None]
    assert (batch["log_probs"] - batch["denominators"])[first].abs().max() < CLOSE
    assert (batch["denominators"] - batch["rollout_log_probs"])[batch["staleness"] > 0].abs().median() > APART


def assert_losses_are_weighted(
    batch: dict[str, torch.Tensor], weights: torch.Tensor, logged: list[dict], num_first: int
) -> None:
    """Assert that each update's loss is the clipped surrogate times `weights`, and that metrics are of pi / mu.

    Args:
        batch: from `trained_on`, of one rank, with the engine's log-probs.
        weights: [samples, actions].
        logged: the run's metrics, a dict per training step.
        num_first: micro-batches in an optimizer step.
    """
    mask, advantages = batch["action_mask"] > 0, batch["loss_advantages"]
    ratio = (batch["log_probs"] - batch["denominators"]).exp()
    clipped = ratio.clamp(batch["lower"][:, None], batch["upper"][:, None])
    loss = -torch.where(mask, weights * torch.minimum(ratio * advantages, clipped * advantages), 0.0)
    behavior_ratio = (batch["log_probs"] - batch["rollout_log_probs"]).exp().double()
    update = batch["place"] // num_first
    for version, metrics in zip(batch["version"].unique().tolist(), logged, strict=True):
        of_step = batch["version"] == version
        assert abs(metrics["offpolicy/ratio_mean"] - behavior_ratio[of_step][mask[of_step]].mean()) < 1e-5
        for number in update[of_step].unique():
            rows = of_step & (update == number)
            # OpenRLHF divides by the update's tokens, and multiplies by the micro-batches that DeepSpeed averages over.
            found = sum(batch["loss"][rows & (batch["place"] == place)][0] for place in batch["place"][rows].unique())
            assert abs(found / num_first - loss[rows].sum() / mask[rows].sum()) < 1e-5, (version, number)


def assert_tokens_are_those_trained_on(
    file: Path, batch: dict[str, torch.Tensor], logged: dict[str, float], num_first: int
) -> None:
    """Assert that a file of --bapo.dump_tokens has all tokens of its training step, with the values that the loss had.

    The loss has no weight for staleness.

    Args:
        file: the file of a step with at most as many tokens as a file holds.
        batch: from `trained_on`, of one rank.
        logged: the step's metrics.
        num_first: micro-batches in an optimizer step.
    """
    table = parquet.read_table(file)
    found = {name: torch.tensor(table[name].to_numpy()) for name in table.column_names}
    step = int(file.stem.split("_")[1])
    batch = {name: tensor[batch["version"] == step - 1] for name, tensor in batch.items()}
    mask = batch["action_mask"] > 0
    sample, _ = mask.nonzero(as_tuple=True)
    update = (batch["place"] // num_first)[:, None].expand_as(mask)
    expected = {
        "global_step": torch.full_like(sample, step),
        "sample": sample,
        "position": (mask.cumsum(-1) - 1)[mask],
        "update": update[mask],
        "staleness": batch["staleness"][mask],
        "optimizer_steps": (batch["optimizer_steps"] + update)[mask],
        "ratio": (batch["log_probs"] - batch["denominators"]).clamp(-20, 20).exp()[mask],
        "probability": batch["log_probs"].exp()[mask],
        "advantage": batch["loss_advantages"][mask],
        "weight": torch.ones(len(sample)),
    }
    for name, values in expected.items():
        assert torch.equal(found[name].to(values.dtype), values), name
    # Compared with the count of OpenRLHF's loss, for each micro-batch.
    for place in batch["place"].unique():
        rows = batch["place"] == place
        (share,) = set(batch["clip_ratio"][rows].tolist())
        assert abs(found["clipped"][rows[sample]].float().mean() - share) < 1e-6
    assert 0 < found["clipped"].float().mean() < 1
    of_updates = [{name: values[found["update"] == n] for name, values in found.items()} for n in update.unique()]
    for name in ("clip_low", "clip_high"):
        assert all(len(set(tokens[name].tolist())) == 1 for tokens in of_updates)
        mean = sum(float(tokens[name][0]) for tokens in of_updates) / len(of_updates)
        assert abs(mean - logged[f"bapo/{name}"]) < 1e-6
