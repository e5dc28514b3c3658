"""What stands in the files of a run, in words: the tables of docs/reference/metrics.md.

Names alone are checked against the code that writes them (tests/unit/test_file_contents.py).
"""

from __future__ import annotations

# key of summary.json -> unit, meaning
SUMMARY: dict[str, tuple[str, str]] = {
    "env_steps": ("steps", "of all workers"),
    "episodes": ("episodes", "finished, of all workers"),
    "updates": ("updates", "–"),
    "wall_seconds": ("seconds", "main worker; starting the processes is not in it"),
    "steps_per_second": ("steps / second", "`env_steps` / `wall_seconds`"),
    "mean_return": ("reward", "mean of the last 100 finished episodes; `null` if there is none"),
    "best_return": ("reward", "the highest return of a single episode"),
    "solved": ("–", "whether `--target-return` was reached by the mean of 100 episodes"),
    "algorithm": ("–", "what ran"),
    "strategy": ("–", "what ran"),
    "engine": ("–", "what ran"),
    "workers": ("–", "how many, those that only learn or serve included"),
    "seed": ("–", "root of every random number"),
    "restarts": (
        "workers",
        "that were killed and started again, each time counted: those that act, with "
        "gradient_server, actor_learner or apex on the local engine; 0 elsewhere, where the loss "
        "of a worker ends the run",
    ),
    "lost_fragments": (
        "unrolls, gradients",
        "not learned from: refused for their lag, or lost with the worker that had made them; 0 "
        "with synchronous strategies",
    ),
    "phase_seconds": (
        "seconds",
        "phase: mean over workers. They run side by side, so it compares with wall time",
    ),
    "exit": (
        "–",
        "`solved`, `finished` (all steps done), `stopped:` and the signal, `stopped by hooks:` "
        "and their reason, or `failed:` and the error",
    ),
    "versions": (
        "–",
        "package: version, of manyhands, python, torch, numpy, gymnasium, the environment's own",
    ),
    "cpu": ("–", "of the main worker's machine, and how many cores it has"),
    "gpu": ("–", "the GPUs of that machine; empty where there is none"),
    "commit": (
        "–",
        "the git commit that is checked out in the working directory; empty outside a repository",
    ),
}

# event of events.jsonl -> its facts, beside `event`, `time` and `wall_seconds`; when it comes
EVENTS: dict[str, tuple[tuple[str, ...], str]] = {
    "start": (("workers", "engine"), "the run begins"),
    "resume": (
        ("workers", "engine", "env_steps", "steps"),
        "it continues from `env_steps`; `steps` are those of the whole run",
    ),
    "resume_note": (("text",), "what could not be restored exactly"),
    "checkpoint": (("env_steps", "name", "milliseconds"), "one was written"),
    "checkpoint_failed": (
        ("env_steps", "error", "checkpoint_failures"),
        "one could not be written; training goes on",
    ),
    "policy_not_written": (("error",), "the disk refused `policy.safetensors`"),
    "worker_fault": (
        (
            "kind",
            "worker",
            "who",
            "what",
            "signal",
            "exit_code",
            "traceback",
            "action",
            "restarts",
        ),
        "the launcher has noticed that a worker failed; `kind` is `raised`, `killed`, `exited`, "
        "`silent` or `stuck`, `action` what was done: `restart`, `continue` or `stop`",
    ),
    "restart": (
        ("worker", "life"),
        "a worker that failed is back, and was heard; `life` counts how often",
    ),
    "worker_joined": (
        ("worker", "who", "there", "most"),
        "with `--workers 2..16`: a worker has come to the run; `there` of `most` are there",
    ),
    "worker_left": (
        ("worker", "who", "there", "most"),
        "one of these is gone, for now or for good",
    ),
    "node_refused": (
        ("host", "why"),
        "a node that came later runs other versions, and has no part in the run",
    ),
    "shard_lost": (
        ("worker", "rows", "what"),
        "apex: an actor was killed; `what` became of the rows of its shard, `keep` or `drop`",
    ),
    "asynchronous": (
        ("late", "lost", "refused", "restarts"),
        "the end of an asynchronous run: messages that came when it was over, that were lost with "
        "their writer, that were too old; workers that were restarted",
    ),
    "start_from": (
        ("run", "taken", "left"),
        "with `--start-from`: what was taken over from that run, and what not, with the reason",
    ),
    "evaluation": (
        (
            "is_best",
            "eval_env_steps",
            "eval_return",
            "eval_return_std",
            "eval_return_min",
            "eval_return_max",
            "eval_length",
        ),
        "with `--eval-every`: the policy of step `eval_env_steps` was evaluated",
    ),
    "evaluation_skipped": (
        ("env_steps",),
        "a newer policy came before that of `env_steps` could be evaluated",
    ),
    "evaluation_failed": (("env_steps", "error"), "that policy could not be evaluated"),
    "evaluator_died": (
        ("env_steps", "code"),
        "the process that evaluates has died, and is started again",
    ),
    "end": (("exit", "env_steps"), "the run has ended, or was asked to stop"),
    "fault": (("error", "env_steps"), "it has failed"),
}
