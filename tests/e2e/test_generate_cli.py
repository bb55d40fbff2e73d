"""`genai generate` as a user runs it: a process, its streams, its exit code."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ROOT / "fixtures" / "packages"
LLAMA = PACKAGES / "llama-fp32-cpu"
GENAI = [sys.executable, "-m", "genai_cli.cli"]


def genai(*args: object, stdin: bytes = b"", env: dict[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [*GENAI, *map(str, args)],
        input=stdin,
        capture_output=True,
        timeout=120,
        check=False,
        env={**os.environ, **(env or {})},
    )


def document(*args: object) -> dict:
    done = genai("generate", *args, "--json")
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def expected(name: str) -> dict:
    return json.loads((PACKAGES / name / "expected.json").read_text())


def ids(name: str = "llama-fp32-cpu") -> str:
    return ",".join(map(str, expected(name)["prompt"]))


@pytest.mark.parametrize("backend", ["native", "ort"])
@pytest.mark.parametrize("name", ["llama-fp32-cpu", "llama-portable", "llama-optimum", "qwen3_5_text-portable"])
def test_both_engines_on_every_kind_of_folder(name: str, backend: str) -> None:
    made = document(
        PACKAGES / name, "--prompt-ids", ids(name), "--max-new-tokens", 8, "--backend", backend, "--ignore-eos"
    )
    assert made["token_ids"] == expected(name)["ort_greedy"][:8]
    assert (made["schema"], made["backend"], made["finish_reason"]) == ("genai.generate/1", backend, "length")
    assert set(made["timings"]) == {"load_s", "ttft_s", "prefill_tok_s", "decode_tok_s"}
    assert made["peak_rss_bytes"] > 10_000_000


def test_a_bare_onnx_file_prints_ids() -> None:
    done = genai("generate", LLAMA / "model.onnx", "--prompt-ids", ids(), "--max-new-tokens", 3)
    assert done.returncode == 0
    assert done.stdout.strip()


def test_the_same_bytes_to_a_pipe_a_file_and_a_terminal(tmp_path: Path) -> None:
    args = ["generate", str(LLAMA), "hello", "--max-new-tokens", "8", "--ignore-eos", "-q"]
    piped = genai(*args).stdout
    with (tmp_path / "out").open("wb") as file:
        subprocess.run([*GENAI, *args], stdout=file, check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == piped != b"\n"
    main, side = pty.openpty()
    process = subprocess.Popen([*GENAI, *args], stdout=side, stderr=subprocess.DEVNULL)
    assert process.wait(60) == 0
    os.close(side)
    assert os.read(main, 65536).replace(b"\r\n", b"\n") == piped
    os.close(main)


@pytest.mark.parametrize("env", [{"LC_ALL": "C", "PYTHONUTF8": "0"}, {"PYTHONIOENCODING": "cp1252"}])
def test_stdout_is_utf8_whatever_the_locale(env: dict[str, str]) -> None:
    args = ("generate", LLAMA, "é🙂", "--max-new-tokens", 12, "--ignore-eos", "--json")
    plain, odd = json.loads(genai(*args).stdout), json.loads(genai(*args, env=env).stdout.decode("utf-8"))
    assert (odd["text"], odd["prompt_token_ids"]) == (plain["text"], plain["prompt_token_ids"])


def test_a_closed_pipe_is_quiet() -> None:
    command = " ".join([*GENAI, "generate", str(LLAMA), "hello", "--max-new-tokens", "200", "--ignore-eos"])
    done = subprocess.run(["bash", "-c", f"{command} | head -c 1"], capture_output=True, timeout=60, check=False)
    assert done.stderr == b""


def test_prompts_from_stdin_and_from_a_file_are_the_same(tmp_path: Path) -> None:
    file = tmp_path / "prompt file ü.txt"
    file.write_bytes("\ufeffTell me.\n".encode())
    more = ("--max-new-tokens", 2, "--json")
    from_file = json.loads(genai("generate", LLAMA, "--prompt-file", file, *more).stdout)
    from_stdin = json.loads(genai("generate", LLAMA, "-", *more, stdin=b"Tell me.\n").stdout)
    from_flag = json.loads(genai("generate", LLAMA, "--prompt", "Tell me.\n", *more).stdout)
    assert from_file["prompt_token_ids"] == from_stdin["prompt_token_ids"] == from_flag["prompt_token_ids"]


USAGE = {
    "no prompt": (["generate", LLAMA], "one prompt was wanted"),
    "two prompts": (["generate", LLAMA, "a", "--prompt", "b"], "one prompt was wanted"),
    "no model": (["generate", "nowhere", "hi"], "does not exist"),
    "unknown backend": (["generate", LLAMA, "hi", "--backend", "tpu"], "wanted native or ort"),
    "bad ids": (["generate", LLAMA, "--prompt-ids", "1,x"], "whole numbers"),
    "ids outside": (["generate", LLAMA, "--prompt-ids", "1,512"], "outside the vocabulary"),
    "too long": (["generate", LLAMA, "--prompt-ids", ",".join(["7"] * 513)], "513 tokens, the context holds 512"),
    "top-p": (["generate", LLAMA, "hi", "--top-p", "7"], "--top-p is 7"),
    "resume without out": (["generate", LLAMA, "hi", "--resume"], "belong to a batch"),
    "no cuda": (["generate", LLAMA, "hi", "--device", "cuda"], "cuda"),
    "seed of more than 64 bits": (["generate", LLAMA, "hi", "--seed", "9" * 20], "wanted 0 to 9223372036854775807"),
    "threads by the million": (["generate", LLAMA, "hi", "--threads", "1000000"], "'--threads'"),
    "pages of no token": (["mirror-check", LLAMA, "--page-size", "0"], "'--page-size'"),
    "rows without a batch": (["generate", LLAMA, "hi", "--batch-size", "2"], "belong to a batch"),
    "no cuda for ort": (
        ["generate", LLAMA, "hi", "--device", "cuda", "--backend", "ort"],
        "it lacks the NVIDIA driver",
    ),
    "odd device": (["generate", LLAMA, "hi", "--device", "tpu"], "wanted `cpu`"),
    "unknown option": (["generate", LLAMA, "hi", "--beams", "4"], "--beams"),
    "unknown isa": (["generate", LLAMA, "hi"], "instruction set `sse9`"),
}


@pytest.mark.parametrize("case", USAGE)
def test_usage_errors_are_one_clear_line_and_exit_2(case: str) -> None:
    args, words = USAGE[case]
    done = genai(*args, env={"GENAI_ISA": "sse9"} if "isa" in case else None)
    text = done.stderr.decode()
    assert done.returncode == 2, text
    assert words in text
    assert "Traceback" not in text
    assert done.stdout == b""


def test_exactly_full_gives_nothing_and_says_length() -> None:
    made = document(LLAMA, "--prompt-ids", ",".join(["7"] * 512))
    assert (made["token_ids"], made["finish_reason"]) == ([], "length")


def test_options_change_the_output() -> None:
    """Each accepted option, against the plain greedy run."""
    base = ("--prompt-ids", ids(), "--max-new-tokens", 12, "--ignore-eos")
    plain = document(LLAMA, *base)
    assert plain["token_ids"] == expected("llama-fp32-cpu")["ort_greedy"][:12]
    sampled = document(LLAMA, *base, "--temperature", 5, "--seed", 3)["token_ids"]
    assert sampled != plain["token_ids"]
    assert document(LLAMA, *base, "--temperature", 5, "--seed", 3, "--backend", "ort")["token_ids"] == sampled
    assert document(LLAMA, *base, "--temperature", 5, "--seed", 4)["token_ids"] != sampled
    assert document(LLAMA, *base, "--temperature", 5, "--seed", 3, "--greedy")["token_ids"] == plain["token_ids"]
    assert document(LLAMA, *base, "--repetition-penalty", 3)["token_ids"] != plain["token_ids"]
    assert document(LLAMA, *base, "--no-repeat-ngram", 2)["token_ids"] != plain["token_ids"]
    assert len(document(LLAMA, *base, "--logprobs", 2)["logprobs"][0]["top"]) == 2
    text = plain["text"]
    stopped = document(LLAMA, *base, "--stop", text[3:5])
    assert stopped["finish_reason"] == "stop_sequence"
    assert stopped["text"] == text[: text.index(text[3:5])]
    raw = document(LLAMA, "hi", "--raw", "--max-new-tokens", 1)["prompt_token_ids"]
    chat = document(LLAMA, "hi", "--max-new-tokens", 1)["prompt_token_ids"]
    system = document(LLAMA, "hi", "--system", "be brief", "--max-new-tokens", 1)["prompt_token_ids"]
    assert len(raw) < len(chat) < len(system)


def lines(*records: object) -> bytes:
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_a_batch_reuses_its_system_prompt_and_equals_single_runs(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    shared = expected("llama-fp32-cpu")["prompt"]
    file.write_bytes(lines(*({"id": f"r{i}", "prompt_ids": [*shared, 20 + i], "max_new_tokens": 4} for i in range(4))))
    done = genai("generate", LLAMA, "--prompts", file, "--out", out, "--page-size", 4)
    assert done.returncode == 0, done.stderr.decode()
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["id"] for record in records] == ["r0", "r1", "r2", "r3"]
    assert [record["num_cached_tokens"] for record in records] == [0, 23, 23, 23]
    assert not out.with_name("out.jsonl.partial").exists()
    cold = genai("generate", LLAMA, "--prompts", file, "--no-prefix-cache")
    assert [json.loads(line)["token_ids"] for line in cold.stdout.splitlines()] == [r["token_ids"] for r in records]


def test_a_bad_line_is_named_and_the_others_run(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    good = json.dumps({"prompt": "line\u2028separator", "max_new_tokens": 1}, ensure_ascii=False).encode()
    bad = [
        b"{",
        b"[1]",
        b'{"prompt": 7}',
        b'{"nothing": 1}',
        b'{"prompt": "\\ud800"}',
        b"\xff",
        b'{"prompt":"a","top_p":9}',
        b'{"prompt":"a","max_new_tokens":"5"}',
        b'{"prompt":"a","max_new_tokens":-3}',
        b'{"prompt":"a","stop":[1]}',
        b'{"prompt":"a","top_k":2.5}',
        b'{"prompt":"a","raw":"false"}',
    ]
    file.write_bytes(b"\xef\xbb\xbf" + good + b"\r\n\r\n" + b"\n".join(bad) + b"\n" + good)
    done = genai("generate", LLAMA, "--prompts", file)
    records = sorted((json.loads(line) for line in done.stdout.decode().split("\n") if line), key=lambda r: r["line"])
    assert done.returncode == 2
    assert ["error" in record for record in records] == [False, *[True] * 12, False]
    assert "line 3: not JSON" in done.stderr.decode()
    assert "Traceback" not in done.stderr.decode()


def test_an_interrupted_batch_resumes_past_a_torn_line(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(lines(*({"prompt_ids": [5, 6, 7 + i], "max_new_tokens": 2} for i in range(5))))
    assert genai("generate", LLAMA, "--prompts", file, "--out", out).returncode == 0
    whole = out.read_bytes().splitlines(keepends=True)
    out.unlink()
    partial = tmp_path / "out.jsonl.partial"
    partial.write_bytes(b"".join(whole[:2]) + whole[2][:20])
    refused = genai("generate", LLAMA, "--prompts", file, "--out", out)
    assert refused.returncode == 2
    assert b"--resume" in refused.stderr
    done = genai("generate", LLAMA, "--prompts", file, "--out", out, "--resume")
    assert done.returncode == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert [record["token_ids"] for record in found] == [json.loads(line)["token_ids"] for line in whole]
    assert b"3 prompts answered, 2 already there" in done.stderr


def hear_interrupts() -> None:
    """Whoever runs the tests in the background has interrupts ignored, which children inherit."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_control_c_is_130_and_keeps_finished_records(tmp_path: Path) -> None:
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_bytes(lines(*({"prompt_ids": [5, 6, 7], "max_new_tokens": 400, "ignore_eos": True} for _ in range(500))))
    process = subprocess.Popen(
        [*GENAI, "generate", str(LLAMA), "--prompts", str(file), "--out", str(out)],
        stderr=subprocess.PIPE,
        preexec_fn=hear_interrupts,
    )
    partial = tmp_path / "out.jsonl.partial"
    deadline = time.monotonic() + 60
    while (not partial.exists() or partial.stat().st_size == 0) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr.decode()
    assert b"Traceback" not in stderr
    assert not out.exists()
    assert all("token_ids" in json.loads(line) for line in partial.read_bytes().split(b"\n")[:-1])


def test_a_full_disk_is_an_error_that_loses_nothing() -> None:
    if not os.path.exists("/dev/full"):
        raise AssertionError("this test needs /dev/full")
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*GENAI, "generate", str(LLAMA), "hi", "--max-new-tokens", "2"],
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert done.returncode == 2
    assert b"No space left" in done.stderr
    assert b"Traceback" not in done.stderr


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['genai', '--help']\nfrom genai_cli.cli import program\n"
        "assert program._run() == 0\nheavy = {'numpy', 'onnx', 'onnxruntime', 'cuda', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr.decode()


def test_an_internal_error_is_70() -> None:
    code = (
        "import sys\nfrom genai_cli.cli import app, main\napp.Console.data = None\nsys.argv[1:] = ['--version']\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=30, check=False)
    assert done.returncode == 70
    assert b"internal error" in done.stderr
    assert b"Traceback" not in done.stderr
