"""Our task files under lm-eval's own command line, against an OpenAI-compatible server on loopback."""

import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import fasttrack.tasks
from fasttrack.tasks import generate

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity", reason="lm-eval's API models need lm-eval[api]")

TASKS = Path(fasttrack.tasks.__file__).parent


@pytest.fixture
def server():
    """Answers chat completions from a table of (text in the prompt, answer), and keeps what it was asked."""
    asked, answers = [], []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            content = body["messages"][-1]["content"]
            text = next((answer for part, answer in answers if part in content), "I do not know.")
            message = {"role": "assistant", "content": text}
            reply = {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
            data = json.dumps(reply).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{httpd.server_port}/v1/chat/completions", asked, answers
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.slow
def test_every_task_runs_under_lm_evals_own_command(server, tmp_path):
    url, asked, answers = server
    rows = {"aime25": generate.aime(4, 1), "gpqa_diamond": generate.gpqa(4, 1), "mrcr": generate.mrcr(4, 1)}
    for row in rows["aime25"][:3]:
        answers.append((row["problem"], f"<think>hm</think>It is \\boxed{{{row['answer']}}}."))
    for row in rows["gpqa_diamond"][:2]:
        answers.append((row["question"], f"\\boxed{{{'ABCD'[row['answer']]}}}"))
    answers.append((rows["mrcr"][0]["prefix"], rows["mrcr"][0]["answer"]))
    scores = {}
    for task, own in rows.items():
        data = write(tmp_path / f"{task}.jsonl", own)
        command = [sys.executable, "-m", "lm_eval", "run", "--model", "local-chat-completions"]
        command += ["--model_args", f"model=fake,base_url={url},num_concurrent=4,tokenizer_backend=None"]
        command += ["--include_path", str(TASKS), "--tasks", f"fasttrack_{task}", "--apply_chat_template"]
        command += ["--metadata", json.dumps({"data": str(data)}), "--output_path", str(tmp_path / "out")]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        for path in (tmp_path / "out").rglob("results_*.json"):
            scores |= json.loads(path.read_text())["results"]
    assert scores["fasttrack_aime25"]["exact_match,none"] == 0.75
    assert scores["fasttrack_gpqa_diamond"]["exact_match,none"] == 0.5
    assert scores["fasttrack_mrcr"]["ratio,none"] == 0.25
    assert scores["fasttrack_mrcr"]["parsed,none"] == 0.25
    assert len(asked) == 12
    assert {body["max_tokens"] for body in asked} == {32768}
    assert all(not body["stop"] for body in asked)  # nothing cuts a reasoning short
    assert "\\boxed{answer}" in asked[0]["messages"][0]["content"]
