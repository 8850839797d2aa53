"""BAPO in TRL's asynchronous trainer as a whole: a vLLM server generates while the trainer trains."""

import json
import os
import time
from multiprocessing import spawn

import pipeline
import pytest
import recordings
import torch
import trl_async_cpu
from datasets import Dataset
from transformers import AutoTokenizer
from trl.experimental.async_grpo import AsyncGRPOConfig

from openrlhf_bapo.trl_async import BapoAsyncGRPOTrainer

# TRL's import sets it, and the engines of other tests would inherit it and keep their configuration to themselves.
os.environ.pop("VLLM_LOGGING_LEVEL", None)

NUM_STEPS, NUM_GENERATIONS, BATCH, ACCUMULATION, MAX_STALENESS = 6, 4, 8, 2, 3


def num_odd(completions, **_) -> list[float]:
    return [sum(c in "13579" for c in turns[0]["content"]) / 8 for turns in completions]


class Recording(BapoAsyncGRPOTrainer):
    """Keeps the weights of each transfer, and the version, weights and micro-batches of each optimizer step."""

    def __init__(self, *args, **kwargs) -> None:
        self.published, self.steps = {}, []
        super().__init__(*args, **kwargs)

    def _copy(self) -> dict:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def _sync_weight(self) -> None:
        super()._sync_weight()
        self.published[self.model_version] = self._copy()

    def get_train_dataloader(self):
        loader = super().get_train_dataloader()
        collate = loader.base_dataloader.collate_fn

        def keep(examples):
            return collate(examples) | {"samples": [row.samples for row in examples[0]]}

        loader.base_dataloader.collate_fn = keep
        return loader

    def compute_loss(self, model, inputs, *args, **kwargs):
        if not self.steps:  # the engine goes on, and three further steps will train on its first policy
            num_samples = 3 * BATCH * ACCUMULATION
            while self.rollout_queue.qsize() < num_samples:
                self.rollout_worker.check_health(self.args.heartbeat_stale_after_s)
                time.sleep(0.1)
        if self._num_trained == 0:
            self.steps.append(dict(version=self.model_version, weights=self._copy(), micro_batches=[]))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        (samples,) = inputs["samples"]
        self.steps[-1]["micro_batches"].append((samples, inputs["model_version"][0].tolist()))
        return loss


class Policies:
    """Recomputes log-probs with a model of transformers' own."""

    def __init__(self, directory) -> None:
        self._model = pipeline.load_model(directory)

    @torch.no_grad()
    def log_probs(self, weights: dict, sample: dict) -> torch.Tensor:
        """log pi under these weights of every token of the sample that is trained on."""
        self._model.load_state_dict(weights)
        ids = torch.tensor(sample["input_ids"])
        log_probs = self._model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        return log_probs[torch.tensor(sample["completion_mask"])[1:] > 0]


@pytest.fixture
def server(tmp_path):
    """The address of a vLLM server in float32 with a tiny model, and the model's folder."""
    directory = pipeline.make_model(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(directory / "model")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    tokenizer.response_template = {"defaults": {"role": "assistant"}, "fields": {"content": {}}}
    tokenizer.save_pretrained(directory / "model")
    port, log = pipeline.free_port(), tmp_path / "server.log"
    flags = dict(
        model=directory / "model",
        host="127.0.0.1",
        port=port,
        dtype="float32",
        max_model_len=64,
        weight_transfer_config=json.dumps({"backend": "nccl"}),
        logprobs_mode="processed_logprobs",
    )
    command = [pipeline.warm_python(), "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
    command += [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    path = pipeline.python_path(pipeline.SUPPORT / "trl_server", pipeline.SUPPORT)
    with pipeline.running(command, log, PYTHONPATH=path, VLLM_SERVER_DEV_MODE="1") as process:
        pipeline.wait_until(lambda: "Application startup complete" in log.read_text(), process, log)
        yield f"http://127.0.0.1:{port}", directory


def test_ratios_are_against_the_policies_that_generated_while_the_trainer_went_on(server, monkeypatch):
    trl_async_cpu.run_on_cpu(monkeypatch)
    monkeypatch.setattr(spawn, "_python_exe", os.fsencode(pipeline.warm_python()))
    address, directory = server
    trainer = Recording(
        str(directory / "model"),
        num_odd,
        args=AsyncGRPOConfig(
            output_dir=str(directory / "out"),
            vllm_server_base_url=address,
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=ACCUMULATION,
            num_generations=NUM_GENERATIONS,
            max_completion_length=8,
            max_staleness=MAX_STALENESS,
            token_budget=0,
            max_steps=NUM_STEPS,
            learning_rate=3e-3,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": [{"role": "user", "content": f"{i}+{i}="}]} for i in range(10)]),
        bapo="paper",
    )
    trainer.train()

    logged = [entry for entry in trainer.state.log_history if "offpolicy/ess" in entry]
    assert len(trainer.steps) == len(logged) == NUM_STEPS
    policies, gaps = Policies(directory), []
    for step, entry in zip(trainer.steps, logged, strict=True):
        new, old, staleness = [], [], []
        for samples, tags in step["micro_batches"]:
            for sample, tag in zip(samples, tags, strict=True):
                assert 0 < tag <= step["version"]
                kept = torch.tensor(sample["old_log_probs"])[sample["completion_mask"] > 0]
                versions = range(tag, step["version"] + 1)
                of_versions = [policies.log_probs(trainer.published[version], sample) for version in versions]
                distance = (torch.stack(of_versions) - kept).abs()
                index = 0  # a response that was under way during a transfer goes on with the new weights
                for place, token in enumerate(distance.T):
                    index = next((i for i in range(index, len(token)) if token[i] < recordings.CLOSE), None)
                    assert index is not None, (tag, distance)
                    old.append(of_versions[index][place])
                gaps += distance[1:].flatten().tolist() if distance[0].max() < recordings.CLOSE else []
                new.append(policies.log_probs(step["weights"], sample))
                staleness.append(torch.full_like(kept, step["version"] - tag))
        ratio, staleness = (torch.cat(new) - torch.stack(old)).exp().double(), torch.cat(staleness)
        assert entry["offpolicy/staleness_max"] == staleness.max()
        assert entry["offpolicy/staleness_mean"] == pytest.approx(float(staleness.mean()), rel=1e-5)
        assert entry["offpolicy/optimizer_steps_max"] == staleness.max()  # weights are transferred after every step
        assert entry["offpolicy/ratio_mean"] == pytest.approx(float(ratio.mean()), rel=1e-3)
        ess = float(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
        assert entry["offpolicy/ess"] == pytest.approx(ess, rel=1e-3)
    assert torch.tensor(gaps).median() > recordings.APART  # so that the versions can be told apart
    # The queue had three steps of the first policy's samples, and TRL drops those that are older than MAX_STALENESS
    # when it takes them, a micro-batch before it trains on them.
    assert [entry["offpolicy/staleness_max"] for entry in logged[:4]] == [0, 1, 2, 3]
    assert min(tag for _, tags in trainer.steps[-1]["micro_batches"] for tag in tags) > 1
