"""Checks of the files that a command names, before Ray starts.

Data files are checked by their rows, models by the files in their folder, reward functions and agents by loading them.
These checks get only the flag that names the file, not the whole command.
"""

import codecs
import contextlib
import csv
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors import SafetensorError, safe_open

from openrlhf_bapo.flags.mistakes import FlagError

LOAD_LIMIT = 300
"""Seconds that the import of a reward-function or agent file may take."""

ENCODING = "utf-8-sig"
"""Of data files: accepts a byte order mark, as `datasets` and pandas do."""

_CSV_ROWS = 10_000  # in which `datasets` infers the types of columns
_SMALL_FILE, _END_OF_FILE = 8 << 20, 1 << 20
"""Bytes: the largest data file that is read whole, and the part that is read at each end of a larger one."""

# Loads a file as OpenRLHF's engines do (utils/agent.py and trainer/ray/vllm_engine.py). Only a process that reaches the
# last line exits with `_LOADED`, even if the file starts threads or ends the process itself.
_LOADED = 42
_LOAD = """
import importlib.util, os, sys
from openrlhf_bapo.openrlhf.registration import register
register()
spec = importlib.util.spec_from_file_location(sys.argv[2], sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
{use}
os._exit({loaded})
"""
_USES = {
    "reward_func": """
if not callable(module.reward_func):
    raise TypeError("reward_func is not a function")
""",
    "AgentExecutor": """
from openrlhf.utils.agent import AgentExecutorBase
if not issubclass(module.AgentExecutor, AgentExecutorBase):
    raise TypeError("AgentExecutor is not an openrlhf.utils.agent.AgentExecutorBase")
module.AgentExecutor()
""",
}


def warn(message: str) -> None:
    """Print one line on stderr about a probable mistake."""
    print(f"openrlhf-bapo: warning: {message}", file=sys.stderr)


# Data.

# Marks that begin a user's turn, or the text, in the chat templates of ChatML, Llama, DeepSeek, Gemma and Mistral.
_TEMPLATE_MARK = re.compile(
    r"<\|(?:im_start|start_header_id|begin_of_text|user)\|>|<\uff5c(?:User|begin\u2581of\u2581sentence)\uff5c>"
    r"|<start_of_turn>|\[INST\]"
)
_MESSAGES = re.compile(r"""\s*\[\s*\{\s*['"](?:role|content|from|value)['"]\s*:""")


def listed(names: str | None) -> list[str]:
    """Split the names of data sets as OpenRLHF does: by comma, each without its "@folder"."""
    return [name for name, _ in listed_with_folders(names)]


def listed_with_folders(names: str | None) -> list[tuple[str, str]]:
    """Split the names of data sets as OpenRLHF does: by comma, each with its "@folder" apart."""
    parts = (name.split("@") for name in names.split(",")) if names else ()
    return [(name.strip(), folder[0].strip() if folder else "") for name, *folder in parts]


def is_hub_name(name: str) -> bool:
    """Return whether a name may be on the hub: OWNER/NAME, or NAME."""
    return bool(re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name))


def check_rows(
    file: Path, where: str, keys: dict[str, str], apply_chat_template: bool, split: str = "train", folder: str = ""
) -> None:
    """Refuse data that OpenRLHF could not read or tokenize.

    Of a large JSON or CSV file, only rows at its start and end are read, or at its start.

    Args:
        file: JSON, JSONL, CSV, Parquet, Arrow, or a directory that `datasets` loads; other data is not checked.
        where: the start of a message: the flag and the file.
        keys: keys that every row must have, by the flag that names them; the input's first.
        apply_chat_template: whether the input may be a list of messages.
        split: of a directory.
        folder: in the directory, if only that is loaded.
    """
    try:
        if file.is_dir():
            return _check_directory(file, where, keys, apply_chat_template, split, folder)
        if file.suffix in (".csv", ".parquet", ".arrow"):
            return _check_table(_opened_table(file, keys), where, keys, apply_chat_template)
        if file.suffix not in (".json", ".jsonl"):
            return None
        rows = list(json_rows(file, where))
    except FlagError:
        raise
    except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid and an UnicodeDecodeError are ValueErrors
        raise FlagError(f"{where}: cannot be read ({str(error).splitlines()[0]}); allowed: a JSONL file") from None
    if not rows and file.stat().st_size <= _SMALL_FILE:
        raise FlagError(f"{where}: has no rows; allowed: a JSONL file with at least one row")
    for place, row in rows:
        check_row(row, f"{where}: {place}", keys)
    input_key = next(iter(keys.values()))
    _check_inputs(((place, row[input_key]) for place, row in rows), where, keys, apply_chat_template)
    return None


def _check_inputs(
    inputs: Iterable[tuple[str, Any]], where: str, keys: dict[str, str], apply_chat_template: bool
) -> None:
    """Refuse a (place, input) that is empty, or neither a text nor, with a chat template, a list of messages."""
    warn_of_prompts(_checked(inputs, where, keys, apply_chat_template), where, apply_chat_template)


def _checked(
    inputs: Iterable[tuple[str, Any]], where: str, keys: dict[str, str], apply_chat_template: bool
) -> Iterator[tuple[str, Any]]:
    for place, value in inputs:
        if not isinstance(value, str | list if apply_chat_template else str) or not value:
            flag, key = next(iter(keys.items()))
            allowed = "a text, or a list of messages" if apply_chat_template else "a text"
            start = json.dumps(value, default=str)[:40]
            raise FlagError(f"{where}: {place} has {key!r} {start}; allowed for {flag}: {allowed}, not empty")
        yield place, value


def warn_of_prompts(inputs: Iterable[tuple[str, Any]], where: str, apply_chat_template: bool) -> None:
    """Warn of (place, input), texts or lists of messages, that make a wrong prompt without an error."""
    odd: dict[str, list[tuple[str, str]]] = {}
    for place, value in inputs:
        if mistake := _mistake_of(value, apply_chat_template):
            odd.setdefault(mistake[0], []).append((place, mistake[1]))
    for what, found in odd.items():
        warn(f"{where}: {len(found)} prompts {what} ({found[0][0]} has {found[0][1]})")


def _mistake_of(prompt: str | list, apply_chat_template: bool) -> tuple[str, str] | None:
    """Return why an input makes a wrong prompt, and the part of it that shows that; None: nothing is known."""
    if isinstance(prompt, str):
        if _MESSAGES.match(prompt):
            return "are messages written as text, which the model gets as they are", prompt[:40]
        mark = _TEMPLATE_MARK.search(prompt) if apply_chat_template else None
        return ("have a chat template already, and get another one", mark[0]) if mark else None
    users = [each for each in prompt if isinstance(each, dict) and each.get("role") == "user" and each.get("content")]
    if not users:
        shown = json.dumps(prompt, default=str)[:40]
        return "have no message with the role user and a content; templates may leave out all others", shown
    if isinstance(prompt[-1], dict) and prompt[-1].get("role") == "assistant":
        return "end with the assistant's answer, which the model sees", json.dumps(prompt[-1], default=str)[:40]
    return None


def check_joined(names: list[str], where: str) -> None:
    """Refuse data files, of those that exist, whose columns of one name have different types: OpenRLHF joins them."""
    kinds = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
    files = [name for name in names if Path(name).suffix in kinds and Path(name).is_file()]
    if len(files) < 2:
        return
    import datasets  # takes seconds

    try:  # streaming reads only the start of each file
        datasets.concatenate_datasets(
            [
                datasets.load_dataset(kinds[Path(file).suffix], data_files=file, split="train", streaming=True)
                for file in files
            ]
        )
    except ValueError as error:
        key = re.search(r"because the key (.+?) of features", str(error))
        if key is None:
            return  # another mistake, which the checks of each file have or have not found
        problem = f"the column {key[1]!r} has another type in one file than in the others"
        raise FlagError(f"{where}: {problem}; allowed: the same type, or no such column") from None


def count_rows(file: Path) -> int | None:
    """Count the rows of a data file that `check_rows` accepts; None: not known without reading all of a large file."""
    if file.suffix == ".csv":
        with open(file, newline="", encoding=ENCODING) as stream:
            return sum(1 for row in csv.reader(stream) if row) - 1
    if file.suffix == ".parquet":
        return _opened_table(file, {})[1]
    if file.suffix not in (".json", ".jsonl"):
        return None
    if file.stat().st_size <= _SMALL_FILE:
        return sum(1 for _ in json_rows(file, ""))
    with open(file, "rb") as stream:
        num_lines = sum(1 for line in stream if line.strip())
        stream.seek(0)
        return None if stream.read(9).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[") else num_lines


_Table = tuple[list[str], int, Callable[[str], Iterable[Any]]]
"""Names of the columns, number of rows (of a CSV file: whether there are any), parts of a column as pyarrow arrays."""


def _opened_table(file: Path, keys: dict[str, str]) -> _Table:
    """Open a CSV, Parquet or Arrow file, with the types that `datasets` gives its columns."""
    import pyarrow
    import pyarrow.parquet

    if file.suffix == ".csv":
        return _opened_csv(file, keys)
    if file.suffix == ".parquet":
        opened = pyarrow.parquet.ParquetFile(file)
        names, num_rows = opened.schema_arrow.names, opened.metadata.num_rows
        return names, num_rows, lambda key: (batch.column(0) for batch in opened.iter_batches(columns=[key]))
    source = pyarrow.memory_map(str(file))
    try:
        return _in_memory(pyarrow.ipc.open_stream(source).read_all())
    except pyarrow.ArrowInvalid:
        return _in_memory(pyarrow.ipc.open_file(source).read_all())


def _opened_csv(file: Path, keys: dict[str, str]) -> _Table:
    import pandas
    import pyarrow

    with open(file, newline="", encoding=ENCODING) as stream:
        table = csv.reader(stream)
        names, has_rows = next(table, []), any(table)
    # pandas gives the second of two equal names another one, which matters only for the keys.
    names = [name for place, name in enumerate(names) if name in keys.values() or name not in names[:place]]
    most = None if file.stat().st_size <= _SMALL_FILE else _CSV_ROWS

    def columns(key: str) -> Iterable[Any]:
        with pandas.read_csv(file, chunksize=_CSV_ROWS, nrows=most) as chunks:
            yield from (pyarrow.array(chunk[key], from_pandas=True) for chunk in chunks)

    return names, has_rows, columns


def _in_memory(table: Any) -> _Table:
    return table.column_names, table.num_rows, lambda key: table.column(key).chunks


def _check_directory(
    path: Path, where: str, keys: dict[str, str], apply_chat_template: bool, split: str, folder: str
) -> None:
    import datasets

    if (path / f"{path.name}.py").exists():
        return None  # a script
    if any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):  # made by save_to_disk
        data = datasets.load_from_disk(str(path))
        table = (data[split] if isinstance(data, dict) else data).data
        return _check_table(_in_memory(table), where, keys, apply_chat_template)
    builder = datasets.load_dataset_builder(str(path), data_dir=folder or None)
    for file in (builder.config.data_files or {}).get(split, []):
        check_rows(Path(file), f"{where}: {file}", keys, apply_chat_template)
    return None


def _check_table(table: _Table, where: str, keys: dict[str, str], apply_chat_template: bool) -> None:
    names, num_rows, columns = table
    if not num_rows:
        raise FlagError(f"{where}: has no rows; allowed: a file with at least one row")
    if (twice := _repeated(names)) is not None:
        raise FlagError(f"{where}: its table has the column {twice!r} twice; allowed: once")
    check_row(dict.fromkeys(names), f"{where}: its table", keys)
    values = (value for part in columns(next(iter(keys.values()))) for value in part.to_pylist())
    inputs = ((f"row {number}", value) for number, value in enumerate(values, start=1))
    _check_inputs(inputs, where, keys, apply_chat_template)


def check_row(row: object, where: str, keys: dict[str, str]) -> None:
    """Refuse a row that is not a JSON object or lacks one of `keys`, which the flags name."""
    if not isinstance(row, dict):
        raise FlagError(f"{where} is not a JSON object")
    for flag, key in keys.items():
        if key not in row:
            raise FlagError(f"{where} has no key {key!r}; allowed for {flag}: one of {', '.join(row)}")


def json_rows(file: Path, where: str) -> Iterable[tuple[str, Any]]:
    """Yield (place in the file, row) of the rows that are read."""
    size = file.stat().st_size
    with open(file, "rb") as stream:
        if size <= _SMALL_FILE:
            yield from _decoded(stream.read().decode(ENCODING), where)
            return
        first = stream.read(_END_OF_FILE).rpartition(b"\n")[0].removeprefix(codecs.BOM_UTF8)
        stream.seek(size - _END_OF_FILE)
        last = stream.read().partition(b"\n")[2]
    if first.lstrip().startswith(b"["):
        return  # one array, which only a full read could check
    for number, line in enumerate(first.decode().split("\n"), start=1):
        if line.strip():
            yield f"line {number}", json_value(line, f"{where}: line {number}")
    for line in last.decode().split("\n"):
        if line.strip():
            yield "a row at its end", json_value(line, f"{where}: a row at its end")


def _repeated(names: list[str]) -> str | None:
    """Return the first name that comes a second time."""
    if len(set(names)) == len(names):
        return None
    return next(name for place, name in enumerate(names) if name in names[:place])


_TWICE = object()
"""The key under which a JSON object keeps the name of a key that it has twice."""


def _object(pairs: list[tuple[str, Any]]) -> dict:
    twice = _repeated([name for name, _ in pairs])
    return dict(pairs) if twice is None else {_TWICE: twice}


_DECODER = json.JSONDecoder(object_pairs_hook=_object)


def _check_value(value: Any, where: str) -> None:
    """Refuse a JSON value that Python reads, but not the loader of `datasets`, or not as it was written."""
    if isinstance(value, dict) and _TWICE in value:
        raise FlagError(f"{where} has the key {value[_TWICE]!r} twice; allowed: once")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            half = value[error.start].encode("ascii", "backslashreplace").decode()
            raise FlagError(f"{where} has {half}, half of a character; allowed: Unicode text") from None
    elif isinstance(value, dict | list):
        for part in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_value(part, where)


def json_value(text: str, where: str) -> Any:
    """Parse one line; raise FlagError if it is not JSON, or has a key twice or half of a character."""
    try:
        value = _DECODER.decode(text)
    except ValueError as error:
        raise FlagError(f"{where} is not JSON ({error})") from None
    _check_value(value, where)
    return value


def _decoded(text: str, where: str) -> Iterable[tuple[str, object]]:
    """Yield (place, row) of the JSON values of a text, and of the elements of arrays."""
    visible, number, counted, position = re.compile(r"\S"), 1, 0, 0
    while match := visible.search(text, position):
        number, counted = number + text.count("\n", counted, match.start()), match.start()
        place = f"line {number}"
        try:
            value, position = _DECODER.raw_decode(text, match.start())
        except ValueError as error:
            raise FlagError(f"{where}: {place} is not JSON ({error})") from None
        rows = [(place, value)]
        if isinstance(value, list):
            rows = [(f"row {number}", row) for number, row in enumerate(value, start=1)]
        for place, row in rows:
            _check_value(row, f"{where}: {place}")
            yield place, row


# Models.


def model_length(config: Any) -> int | None:
    """Return the positions of a text model, as vLLM computes them from its configuration; None: not known."""
    length = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if length is None or "rope_type" not in rope or rope["rope_type"] in ("su", "longrope", "llama3"):
        return length
    if rope["rope_type"] == "yarn":
        length = rope.get("original_max_position_embeddings") or length
    return int(length * rope.get("factor", 1.0))


def check_model(flag: str, name: str, must_exist: bool, apply_chat_template: bool = False) -> Any:
    """Refuse a model folder whose configuration, tokenizer or weights cannot be loaded.

    A name on the hub is not checked, and a missing folder is refused only if it `must_exist`. With
    `apply_chat_template`, the tokenizer must have a chat template.

    Returns:
        The configuration, or None if nothing was checked.
    """
    folder, where = Path(name), f"{flag} {name}"
    if not folder.is_dir():
        if must_exist and (folder.exists() or not is_hub_name(name)):
            raise FlagError(f"{where}: no such folder; allowed: a model's folder, or its name on the hub")
        if must_exist:
            warn(f"{where}: is not a folder here, so it must be a model on the hub; not checked")
        return None
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise FlagError(f"{where}: has no config.json; allowed: a model's folder, or its name on the hub")
    config = _loaded_by(AutoConfig, where, folder, "config.json")
    _check_architecture(where, config)
    _check_weights(where, folder)
    if not hasattr(config, "vision_config"):
        _check_tokenizer(where, folder, config, apply_chat_template)
    return config


def check_same_tokens(flag: str, name: str, actor: str) -> None:
    """Refuse a critic or reward model that reads the actor's tokens as others; names on the hub are not checked."""
    if name == actor or not (Path(name).is_dir() and Path(actor).is_dir()):
        return
    from transformers import AutoTokenizer

    ours, its = (AutoTokenizer.from_pretrained(folder, trust_remote_code=True).get_vocab() for folder in (actor, name))
    for token, number in ours.items():
        if its.get(token, number) != number:
            raise FlagError(
                f"{flag} {name}: gets the actor's tokens, of which {number} is {token!r}, and its tokenizer has that "
                f"as {its[token]}; allowed: a model with the actor's tokenizer, or --reward.remote_url for rewards"
            )


def check_target_modules(names: list[str], config: Any) -> None:
    """Refuse names of `--ds.lora.target_modules` that a model lacks, which PEFT leaves out, or that it uses twice."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    embeddings = {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = dict(model.named_modules())
    for name in names:
        where = f"--ds.lora.target_modules {name}"
        found = [module for path, module in modules.items() if f".{path}".endswith(f".{name}")]
        if not found:
            kinds = {path.rpartition(".")[2] for path, module in modules.items() if isinstance(module, torch.nn.Linear)}
            raise FlagError(f"{where}: the model has no such module; allowed: all-linear, {', '.join(sorted(kinds))}")
        if config.get_text_config().tie_word_embeddings and not embeddings.isdisjoint(found):
            raise FlagError(f"{where}: the model has one weight for input and output, and adapters would split it")


def _loaded_by(loader: Any, where: str, folder: Path, what: str) -> Any:
    try:
        return loader.from_pretrained(folder, trust_remote_code=True)
    except Exception as error:  # transformers and a model's own code raise many kinds
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise FlagError(f"{where}: its {what} cannot be loaded ({reason[0]})") from None


def _check_architecture(where: str, config: Any) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    knows = config.model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or hasattr(config, "vision_config")
    if not knows and not getattr(config, "auto_map", None):
        kind = f"its model_type {config.model_type!r}"
        raise FlagError(f"{where}: {kind} is not a language model that transformers knows")


def _check_tokenizer(where: str, folder: Path, config: Any, apply_chat_template: bool) -> None:
    from transformers import AutoTokenizer

    # Without a vocabulary, transformers makes an empty tokenizer.
    if not any(True for name in ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken") for _ in folder.glob(name)):
        raise FlagError(f"{where}: has no tokenizer (tokenizer.json); allowed: a model's folder with one")
    tokenizer = _loaded_by(AutoTokenizer, where, folder, "tokenizer")
    if tokenizer.eos_token is None and tokenizer.pad_token is None:
        problem = "its tokenizer has neither an EOS nor a padding token"
        raise FlagError(f"{where}: {problem}; allowed: a tokenizer with an EOS token")
    if tokenizer.eos_token is None:
        warn(f"{where}: its tokenizer has no EOS token, so every response grows to its maximum length")
    if apply_chat_template and tokenizer.chat_template is None:
        problem = f"the tokenizer of {folder} has no chat template"
        raise FlagError(f"--data.apply_chat_template: {problem}; give --data.input_template instead")
    size = getattr(config.get_text_config(), "vocab_size", None)
    for name in ("EOS", "padding"):
        token, number = (getattr(tokenizer, f"{name[:3].lower()}_token{part}") for part in ("", "_id"))
        if size is not None and number is not None and number >= size:
            problem = f"its {name} token {token!r} is number {number}"
            raise FlagError(f"{where}: {problem}; allowed: below the model's {size}")
    if size is not None and len(tokenizer) > size:
        warn(f"{where}: its tokenizer has {len(tokenizer)} tokens, its model {size}")


def _check_weights(where: str, folder: Path) -> None:
    for single in ("model.safetensors", "pytorch_model.bin"):
        files, index = [folder / single], folder / f"{single}.index.json"
        if not files[0].is_file() and index.is_file():
            try:
                files = [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            except (ValueError, KeyError, AttributeError):
                raise FlagError(f"{where}: {index.name} is damaged; copy it again") from None
        elif not files[0].is_file():
            continue
        for file in files:
            if not file.is_file():
                raise FlagError(f"{where}: {file.name}, which {index.name} names, is missing")
            try:
                if single == "model.safetensors":
                    safe_open(file, "pt")  # reads the header, and compares the size in it with the file's
            except SafetensorError as error:
                problem = f"{file.name} is not a whole safetensors file ({error})"
                raise FlagError(f"{where}: {problem}; copy it again") from None
        return
    if (folder / "adapter_config.json").is_file():
        allowed = "a whole model, which python -m openrlhf.cli.lora_combiner makes of the adapter and its start model"
        raise FlagError(f"{where}: is a LoRA adapter; allowed: {allowed}")
    raise FlagError(f"{where}: has no weights (model.safetensors, or its index); allowed: a model's folder with them")


# Rewards and agents.


@contextlib.contextmanager
def loading(flag: str, file: str, name: str) -> Iterator[None]:
    """Load a user's Python file beside the body of `with`, in another process, since it may hang, exit or fork.

    After the body, a file that cannot be loaded, lacks `name`, or takes longer than `LOAD_LIMIT` is refused. `name` is
    "reward_func" or "AgentExecutor". An engine would wait for such a file forever.
    """
    where, allowed = f"{flag} {file}", f"allowed: a file that defines {name}"
    program = [sys.executable, "-c", _LOAD.format(use=_USES[name], loaded=_LOADED), file, name]
    with tempfile.TemporaryFile("w+", errors="replace") as errors:  # not a pipe, which stays open with its children
        nothing = subprocess.DEVNULL
        process = subprocess.Popen(program, stdin=nothing, stdout=nothing, stderr=errors, start_new_session=True)
        try:
            yield
            code = process.wait(LOAD_LIMIT)
        except subprocess.TimeoutExpired:
            raise FlagError(f"{where}: is still loading after {LOAD_LIMIT} s; {allowed}") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        errors.seek(0)
        said = [line.strip() for line in errors.read().split("\n") if line.strip()]
    if code != _LOADED:
        reason = said[-1] if said else f"it exits with {code}"
        raise FlagError(f"{where}: cannot be loaded ({reason}); {allowed}")


def check_python_file(flag: str, file: str, allowed: str) -> None:
    """Raise FlagError for a file that is missing or not Python."""
    if not Path(file).is_file():
        raise FlagError(f"{flag} {file}: no such file; allowed: {allowed}")
    if not file.endswith(".py"):
        raise FlagError(f"{flag} {file}: allowed: {allowed}")


def is_reward_file(flag: str, reward: str) -> bool:
    """Say whether rewards come from a Python file, and not from URLs; refuse anything else."""
    allowed = "a reward-function file (.py), or HTTP URLs, comma-separated"
    if reward.endswith(".py") and "," not in reward:
        check_python_file(flag, reward, allowed)
        return True
    if not all(map(_is_url, reward.split(","))):
        raise FlagError(f"{flag} {reward}: allowed: {allowed}")
    return False


def _is_url(text: str) -> bool:
    """Return whether a text is an HTTP address with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # not a port
        return False


def nearest_folder(folder: str | Path) -> Path:
    """Return the folder, or its nearest ancestor that exists."""
    there = Path(folder).absolute()
    while not there.exists():
        there = there.parent
    return there
