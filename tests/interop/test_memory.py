"""Files that declare enormous sizes are refused before memory is allocated for them."""

import json
import os
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from tests.interop import hostile, models

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

# Run in a child process whose memory is limited to 1 GiB more than after the imports, and measured.
CHILD = """
import json, resource, sys, time
from t2t_jax.interop import from_fairseq, from_marian
import torch, safetensors.numpy

commands = json.loads(sys.argv[1])
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30),) * 2)
for system, arguments in commands:
    before, start = peak(), time.monotonic()
    code = {"marian": from_marian, "fairseq": from_fairseq}[system].main(arguments)
    print(json.dumps([code, peak() - before, time.monotonic() - start]), flush=True)
"""


@pytest.fixture
def marian(tmp_path):
    from t2t_jax.interop.export import export_run

    run = models.random_run(tmp_path / "run")
    export_run(str(run), format="marian", output=str(tmp_path / "marian"), step=None)
    return tmp_path / "marian"


def sparse(path, size):
    """A file of `size` zero bytes that takes no space on the disk."""
    path.unlink(missing_ok=True)
    path.touch()
    os.truncate(path, size)


def bomb(path, size):
    """A zip file of a few megabytes with `size` zeros in it."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file,
        file.open("archive/data/0", "w") as member,
    ):
        for _ in range(size >> 20):
            member.write(bytes(1 << 20))


@pytest.mark.slow
def test_enormous_files_are_refused_with_little_memory_and_time(marian, tmp_path):
    cases = []  # system, arguments, the message

    def marian_case(change, message):
        folder = tmp_path / f"case{len(cases)}"
        shutil.copytree(marian, folder)
        change(folder)
        cases.append(("marian", [str(folder), str(tmp_path / "out")], message))

    def torch_case(value, message):
        def change(folder):
            (folder / "model.safetensors").unlink()
            torch.save(value, folder / "pytorch_model.bin")

        marian_case(change, message)

    marian_case(lambda f: sparse(f / "config.json", 1 << 40), "at most 16,777,216 are read")
    marian_case(lambda f: sparse(f / "vocab.json", 1 << 40), "at most 16,777,216 are read")
    marian_case(lambda f: [sparse(f / f"{side}.spm", 1 << 40) for side in ("source", "target")], "at most 16,777,216")
    entry = {"dtype": "F32", "shape": [1 << 30, 1 << 8], "data_offsets": [0, 1 << 40]}

    def long_tensor(folder):
        path = folder / "model.safetensors"
        hostile.raw_safetensors(path, {"lm_head.weight": entry})
        os.truncate(path, path.stat().st_size + (1 << 40))

    marian_case(long_tensor, "model.safetensors")
    torch_case({"lm_head.weight": torch.ones(1, 1).expand(1 << 30, 1 << 8)}, "weight has shape (1073741824, 256)")
    torch_case({"lm_head.weight": torch.ones(1, 1).expand(1 << 36, 16)}, "1,099,511,627,776 values, but is only")
    shared = torch.ones(10_000, 16)
    names = ("shared", "encoder.embed_tokens", "decoder.embed_tokens", "lm_head")
    state = {f"{name}.weight": shared.expand(10_000, 16) for name in names}
    torch_case(state | {"final_logits_bias": torch.ones(1, 1).expand(1, 10**9)}, "values, but is only")

    def zeros(folder):
        (folder / "model.safetensors").unlink()
        bomb(folder / "pytorch_model.bin", 1 << 29)

    marian_case(zeros, "is compressed: 536,870,912 bytes in")
    sparse(tmp_path / "dict.txt", 1 << 40)
    spm = marian / "source.spm"
    np.savez(tmp_path / "small.npz", np.zeros(3))
    arguments = [str(tmp_path / "small.npz"), str(tmp_path / "dict.txt"), str(tmp_path / "out")]
    cases.append(("fairseq", [*arguments, f"--sentencepiece={spm}"], "dict.txt has 1,099,511,627,776 bytes"))

    commands = json.dumps([case[:2] for case in cases])
    ended = subprocess.run([sys.executable, "-c", CHILD, commands], capture_output=True, text=True)
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(found) == len(cases), ended.stderr
    for (code, megabytes, seconds), (_, _, message), line in zip(found, cases, ended.stderr.splitlines(), strict=True):
        assert code == 2 and message in line
        assert megabytes < 200 and seconds < 5, line
    assert not (tmp_path / "out").exists()


WRITER = """
import resource, sys
from pathlib import Path
import numpy as np
from t2t_jax.interop.to_safetensors import write_weights
import safetensors.numpy

weights = {"a": np.ones(32 << 20, np.float32)}
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)
write_weights(Path(sys.argv[1]), weights, "pt")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20,) * 2)
try:
    write_weights(Path(sys.argv[2]), weights, "pt")
except OSError as error:
    print(error)
"""


def test_weights_are_written_without_a_second_copy_of_them_and_what_fails_is_named(tmp_path):
    path, refused = tmp_path / "model.safetensors", tmp_path / "refused.safetensors"
    command = [sys.executable, "-c", WRITER, str(path), str(refused)]
    done = subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    assert path.stat().st_size > 128 << 20
    assert done.stdout == f"[Errno 27] File too large: '{refused}'\n", "the file system's reason, with the file"
