"""A real Slurm on this machine: slurmctld, munged and a slurmd per node, in namespaces that end with the test.

Every node has a host name and an address of its own, as on a cluster: what they share is the file system. All processes,
also those of jobs, are in one PID namespace, which the kernel empties when its first process is killed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from sight import until

_START = r"""
set -eu
mount --bind "$BASE/hosts" /etc/hosts
hostname head
ip link set lo up
ip link add cluster type bridge
ip addr add 10.78.0.1/24 dev cluster
ip link set cluster up
mkdir -p /run/netns && mount -t tmpfs tmpfs /run/netns
for number in $(seq 8); do mknod "$BASE/gpu$number" c 1 3; done
mungekey -c -k "$BASE/munge.key"
munged --force --key-file="$BASE/munge.key" --socket="$BASE/munge.sock" --pid-file="$BASE/munged.pid" \
    --log-file="$BASE/munged.log" --seed-file="$BASE/munge.seed"
slurmctld -i
for number in $(seq "$NODES"); do
    name=n$number
    mkdir "$BASE/spool/$name"
    ip netns add "$name"
    ip link add "v$number" type veth peer name eth0 netns "$name"
    ip link set "v$number" master cluster up
    ip -n "$name" link set lo up
    ip -n "$name" addr add "10.78.0.$((number + 10))/24" dev eth0
    ip -n "$name" link set eth0 up
    nsenter --net="/run/netns/$name" unshare --uts sh -c "hostname $name && exec slurmd -N $name"
done
touch "$BASE/started"
sleep infinity &
while :; do wait; done
"""

_CONFIG = """
ClusterName=test
SlurmctldHost=head(10.78.0.1)
AuthType=auth/munge
AuthInfo=socket={base}/munge.sock
SlurmUser=root
SlurmdUser=root
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool/%n
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd-%n.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd-%n.log
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerParameters=batch_sched_delay=0,bf_interval=1,sched_interval=2
SlurmdParameters=config_overrides
ReturnToService=2
KillWait=10
GresTypes=gpu
PartitionName=all Nodes=ALL Default=YES State=UP
"""


class Cluster:
    """A running cluster with nodes n1, n2, ..., each with eight GPUs that exist only for Slurm.

    Args:
        base: an empty directory with a short path: sockets are in it.
        nodes: how many.
    """

    def __init__(self, base: Path, nodes: int) -> None:
        self.base = base
        self._environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_CONF": str(base / "slurm.conf")}
        for folder in ("state", "spool"):
            (base / folder).mkdir()
        names = {"head": 1, **{f"n{number}": number + 10 for number in range(1, nodes + 1)}}
        hosts = [f"10.78.0.{number} {name}\n" for name, number in names.items()]
        (base / "hosts").write_text("127.0.0.1 localhost\n" + "".join(hosts))
        (base / "gres.conf").write_text(f"Name=gpu File={base}/gpu[1-8]\n")
        node = "NodeName={} NodeAddr=10.78.0.{} CPUs=64 RealMemory=100000 Gres=gpu:8\n"
        lines = [node.format(name, number) for name, number in names.items() if name != "head"]
        (base / "slurm.conf").write_text(_CONFIG.format(base=base) + "".join(lines))
        namespaces = "--mount --uts --net --pid --fork --kill-child --mount-proc".split()
        with (base / "start.log").open("wb") as log:
            self._holder = subprocess.Popen(
                ["setpriv", "--pdeathsig", "KILL", "unshare", *namespaces, "bash", "-c", _START],
                env={**self._environment, "BASE": str(base), "NODES": str(nodes)},
                stdout=log,
                stderr=log,
            )

    def wait(self) -> None:
        """Wait until all nodes can be used."""
        until((self.base / "started").exists, 60, lambda: (self.base / "start.log").read_text())
        until(lambda: self.run("sinfo", "-h", "-o", "%t").split() == ["idle"], 60, lambda: self.run("sinfo", "-N"))

    def run(self, *command: object, cwd: Path = Path("/"), **variables: str) -> str:
        """Run a command on the head node as a user who has activated nothing; its output."""
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        done = subprocess.run(
            ["nsenter", "-t", children[0], "-m", "-u", "-n", "-p", f"--wdns={cwd}", *map(str, command)],
            env={**self._environment, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def job(self, number: str) -> dict[str, str]:
        """The facts of a job, as `scontrol show job` prints them."""
        words = self.run("scontrol", "--oneliner", "show", "job", number).splitlines()[0].split()
        return {name: value for name, _, value in (word.partition("=") for word in words)}

    def close(self) -> None:
        """End it, with everything that runs there."""
        self._holder.kill()
        self._holder.wait()
