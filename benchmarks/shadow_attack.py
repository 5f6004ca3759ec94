"""The Shadow attack beside IBM's Adversarial Robustness Toolbox: same records, networks and work, one run.

Both train the same number of shadow networks (the target's network, loss and epochs) on halves of the same 2n leftover
records, one attack network of 64 units per class on their answers, and judge the same target's answers. The target is
trained once and not timed; nor are imports and files.

ART lives in an environment of its own (its requirements are not ours; see `peers.py`). Without it (--without-art) only
Quietmax is timed. Both run in turns (--rounds), so that a change of the machine's load can be seen; on a busy machine
compare the processor times.

    python benchmarks/shadow_attack.py [--rounds 3] [--data-dir DATA]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from peers import peer_python
from ratios import report

if TYPE_CHECKING:
    from quietmax.data import Split
    from quietmax.models import Model

REQUIRED, AIMED = 6.0, 15.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dataset", default="location")
    parser.add_argument("--data-dir")
    parser.add_argument("--shadows", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=1, help="Alternating runs of both.")
    parser.add_argument(
        "--quick", action="store_true", help="500 embedded digits, 2 shadow networks, without ART."
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--without-art", action="store_true")
    parser.add_argument("--art-part", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.art_part is not None:
        run_art(options.art_part)
        return
    if options.quick:
        options.dataset, options.shadows, options.without_art = "mnist-5k", 2, True
    compare(options)


def compare(options: argparse.Namespace) -> None:
    from quietmax.attacks import Shadow
    from quietmax.data import Split, load
    from quietmax.models import train

    records = 500 if options.quick else None
    data = load(options.dataset, records=records, data_dir=options.data_dir, seed=options.seed)
    size = len(data.train_rows)
    # ART divides all records it is given in halves, so both get 2n of the leftover ones.
    data = Split(data.records, data.train_rows, data.test_rows, data.pool_rows[: 2 * size], data.seed)
    model = train(data)
    print(
        f"{options.dataset}: {size} records, {data.classes} classes, {options.shadows} shadow networks, torch "
        f"{torch.__version__}, {torch.get_num_threads()} thread(s)"
    )

    def ours() -> tuple[float, float, float]:
        start, processor = time.perf_counter(), time.process_time()
        found = Shadow(models=options.shadows, seed=options.seed).run(model, data)
        taken = time.perf_counter() - start, time.process_time() - processor
        leakage = found.leakage.value
        print(
            f"quietmax   {taken[0]:8.1f} s, {taken[1]:7.1f} s of processor  leakage {leakage:.4f}",
            file=sys.stderr,
        )
        return *taken, leakage

    case = f"{options.dataset}, {options.shadows} shadow networks"
    if options.without_art:
        report("Shadow attack", case, [ours()[0]], "s")
        return
    python = peer_python("art")
    runs = [(ours(), art_attack(python, options, data, model, size)) for _ in range(options.rounds)]
    for what, index in (("", 0), (", processor time", 1)):
        report(
            "Shadow attack",
            case + what,
            [mine[index] for mine, _ in runs],
            "s",
            peer="IBM ART",
            theirs=[other[index] for _, other in runs],
        )
    difference = max(abs(mine[2] - other[2]) for mine, other in runs)
    print(
        f"required ratio {REQUIRED:g}, aimed for {AIMED:g}; leakages differ by at most {difference:.4f} (0.05 wanted)"
    )


def art_attack(
    python: Path, options: argparse.Namespace, data: Split, model: Model, size: int
) -> tuple[float, float, float]:
    """One run in ART's environment: seconds, seconds of processor, leakage."""
    with tempfile.TemporaryDirectory() as folder:
        exchange = Path(folder) / "exchange.npz"
        rows = np.concatenate([data.train_rows, data.test_rows])
        np.savez(
            exchange,
            shadow_features=data.pool.features,
            shadow_labels=data.pool.labels,
            answers=model.predict_proba(data.records.features[rows]).astype(np.float32),
            labels=data.records.labels[rows],
            hidden=model.settings.hidden[0],
            classes=data.classes,
            alpha=model.settings.loss.alpha,
            epochs=model.settings.epochs,
            batch=model.settings.batch_size,
            rate=model.settings.learning_rate,
            l2=model.settings.l2,
            shadows=options.shadows,
            seed=options.seed,
        )
        command = [
            str(python),
            __file__,
            "--threads",
            str(options.threads),
            "--art-part",
            str(exchange),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    art = json.loads(done.stdout.splitlines()[-1])
    seconds = sum(art["seconds"].values())
    called = np.array(art["called_members"])
    leakage = float(called[:size].mean() - called[size:].mean())
    parts = ", ".join(f"{what} {value:.1f}" for what, value in art["seconds"].items())
    spent = f"{seconds:8.1f} s, {art['processor']:7.1f} s of processor"
    print(f"ART {art['version']} {spent}  leakage {leakage:.4f}  ({parts})", file=sys.stderr)
    return seconds, float(art["processor"]), leakage


def run_art(exchange: Path) -> None:
    """The same attack in ART; runs in its environment and prints one line of JSON."""
    import art
    from art.attacks.inference.membership_inference import MembershipInferenceBlackBox, ShadowModels
    from art.estimators.classification import PyTorchClassifier

    given = np.load(exchange)
    classes, epochs, batch = (int(given[name]) for name in ("classes", "epochs", "batch"))

    class Configured(PyTorchClassifier):
        """ART fits shadow and attack models with its default epochs and batch size; here with the paper's."""

        def fit(self, x, y, **_) -> None:
            super().fit(x, y, batch_size=batch, nb_epochs=epochs)

    class ConvexifiedLoss(torch.nn.Module):
        """The loss averaged over samples and classes, on one-hot labels."""

        def forward(self, logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
            exponents = -float(given["alpha"]) * torch.log_softmax(logits, -1) * truth
            return (torch.logsumexp(exponents.flatten(), 0) - np.log(exponents.numel())) / float(
                given["alpha"]
            )

    def classifier(features: int, hidden: int, outputs: int, rate: float, l2: float, loss: torch.nn.Module):
        network = torch.nn.Sequential(
            torch.nn.Linear(features, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, outputs)
        )
        optimizer = torch.optim.Adam(network.parameters(), lr=rate, weight_decay=2 * l2)
        return Configured(network, loss, (features,), outputs, optimizer=optimizer)

    torch.manual_seed(int(given["seed"]))
    template = classifier(
        given["shadow_features"].shape[1],
        int(given["hidden"]),
        classes,
        float(given["rate"]),
        float(given["l2"]),
        ConvexifiedLoss(),
    )
    one_hot = np.eye(classes, dtype=np.float32)
    start, processor = time.perf_counter(), time.process_time()
    shadows = ShadowModels(template, int(given["shadows"]), random_state=int(given["seed"]))
    inside, outside = shadows.generate_shadow_dataset(
        given["shadow_features"], one_hot[given["shadow_labels"]]
    )
    (_, inside_truth, inside_logits), (_, outside_truth, outside_logits) = inside, outside
    trained = time.perf_counter()
    inside_answers, outside_answers = softmax(inside_logits), softmax(outside_logits)
    inside_labels, outside_labels = inside_truth.argmax(-1), outside_truth.argmax(-1)
    attacks = []
    for label in range(classes):
        network = classifier(classes, 64, 2, 0.01, 1e-6, torch.nn.CrossEntropyLoss())
        attack = MembershipInferenceBlackBox(template, attack_model=network, scaler_type=None)
        attack.fit(
            pred=inside_answers[inside_labels == label], test_pred=outside_answers[outside_labels == label]
        )
        attacks.append(attack)
    fitted = time.perf_counter()
    called = np.zeros(len(given["labels"]), dtype=np.int64)
    for label, attack in enumerate(attacks):
        rows = np.flatnonzero(given["labels"] == label)
        if len(rows):
            judged = attack.infer(None, pred=given["answers"][rows], probabilities=True)
            called[rows] = judged[:, 1] > judged[:, 0]
    ended = time.perf_counter()
    seconds = {
        "shadow networks": trained - start,
        "attack networks": fitted - trained,
        "verdicts": ended - fitted,
    }
    spent = time.process_time() - processor
    print(
        json.dumps(
            {
                "processor": spent,
                "version": art.__version__,
                "seconds": seconds,
                "called_members": called.tolist(),
            }
        )
    )


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


if __name__ == "__main__":
    main()
