"""Memory against the number of clients and the number of rounds.

The same images are dealt to 10 and to 200 clients of the local engine; each is a process of its own whose highest
resident memory counts (``VmHWM``).  Then many rounds: resident memory after each.
"""

from __future__ import annotations

import json
import subprocess
import sys

from common import MB, SMALL, Case, Federation, machine, smaller, table, torchvision_network

IMAGES = 400
NETWORK = Case("images of 32x32, ResNet-18", torchvision_network("resnet18"), (3, 32, 32), 10, 40, 20)
ROUNDS = 50


def resident() -> dict[str, float]:
    """Resident memory now and at its highest, MB."""
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return {"now": float(fields["VmRSS"].split()[0]) * 1024 / MB, "peak": float(fields["VmHWM"].split()[0]) * 1024 / MB}


def in_process(method: str, clients: int) -> None:
    if clients:
        case, rounds = smaller(NETWORK, clients=clients, samples=IMAGES // clients), 2
    else:
        case, rounds = smaller(SMALL, clients=5), ROUNDS
    federation = Federation.of(case, {"name": method})
    after = []
    for _ in range(rounds):
        federation.round()
        after.append(resident()["now"])
    print(json.dumps({"after": after, **resident()}))


def measure(method: str, clients: int) -> dict:
    command = [sys.executable, __file__, method, str(clients)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])


def main() -> None:
    if len(sys.argv) == 3:
        in_process(sys.argv[1], int(sys.argv[2]))
        return
    rows, growth = [], []
    for method in ("fedavg", "fedism"):
        few, many = measure(method, 10)["peak"], measure(method, 200)["peak"]
        rows.append([method, few, many, many / few])
        after = measure(method, 0)["after"]
        growth.append([method, *(after[r - 1] for r in (2, 10, 25, ROUNDS)), after[-1] / after[1]])
    table(["peak, MB", "10 clients", "200 clients", "ratio"], rows)
    print()
    table(["resident, MB, after round", "2", "10", "25", str(ROUNDS), "last to second"], growth)
    print(machine())


if __name__ == "__main__":
    main()
