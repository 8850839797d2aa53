"""Reads what tests/support/recording/sitecustomize.py has kept of a run; log-probs anew from plain transformers."""

import collections
from pathlib import Path

import pipeline
import torch
from pyarrow import parquet

# In float32 the same weights differ by the order of sums, 1e-5 at most; those of the next version by 0.05 and more at
# half of the tokens.
CLOSE, APART = 1e-4, 1e-2


def environment(folder: Path, start: int = 0) -> dict[str, str]:
    """Variables for a run that keeps its recording in `folder`; `start`: what its broadcasts are counted from."""
    folder.mkdir()
    path = pipeline.python_path(pipeline.SUPPORT / "recording")
    return {"RECORDING": str(folder), "RECORDING_START": str(start), "PYTHONPATH": path}


def trained_on(folder: Path, model: str = "actor") -> dict[str, torch.Tensor]:
    """All samples that a model was trained on, one batch in the order of training, padded at the end.

    Beside what the recorder kept: "version", the broadcasts before the training step, and "place", the micro-batch's
    among those of its rank since; both [samples].
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
    """The policy of every version: the model that a run started with, and what it broadcast.

    Args:
        model: version 0.
        folders: of recordings; a later one's weights stand for the same version of an earlier one.
    """

    def __init__(self, model: Path, *folders: Path) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)  # a second one gains nothing on tensors of this size, and waits on busy cores
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
            versions: [samples, actions]; a version that never was leaves NaN.
            sampled: of the distribution that the engine sampled from, whose first token is not EOS (min_tokens=1).
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
            log_probs = logits.log_softmax(-1).gather(-1, sequences[:, 1:, None]).squeeze(-1)
            found[rows] = torch.where(chosen[rows], log_probs, found[rows])
        return found


def steps_by_version(batch: dict[str, torch.Tensor], num_first: int) -> dict[int, int]:
    """Optimizer steps that were made after each version's broadcast, from `num_first` micro-batches of a rank each."""
    last_places = collections.defaultdict(int)
    for version, place in zip(batch["version"].tolist(), batch["place"].tolist(), strict=True):
        last_places[version] = max(last_places[version], place)
    return {version: (place + 1) // num_first for version, place in last_places.items()}


def assert_optimizer_steps_are_counted(
    batch: dict[str, torch.Tensor], logged: list[dict], num_first: int, steps: dict[int, int]
) -> None:
    """Every token's count is of the optimizer steps between its weights and the current ones, and so is what is logged.

    Args:
        batch: from `trained_on`.
        logged: the run's metrics, a dict a training step.
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
    """Every denominator is of its token's own version, and of no neighbouring one; the first update's ratios follow.

    Args:
        batch: from `trained_on`.
        policies: of all versions in it.
        sampled: whether denominators are to be the engine's, or the actor's own.
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


def assert_tokens_are_those_trained_on(
    file: Path, batch: dict[str, torch.Tensor], logged: dict[str, float], num_first: int
) -> None:
    """A file of --bapo.dump_tokens has every token of its training step, with its own numbers, clipped as the loss did.

    Args:
        file: of a step without more tokens than a file holds.
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
    }
    for name, values in expected.items():
        assert torch.equal(found[name].to(values.dtype), values), name
    # As OpenRLHF's loss itself counted them, a micro-batch at a time.
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
