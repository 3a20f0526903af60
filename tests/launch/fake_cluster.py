"""Several "hosts" on one machine: network, name, IPC and mount namespaces on a bridge of their own, each with an sshd.

As root: `python tests/launch/fake_cluster.py 2 -- bash` gives a shell in which `ssh -F $FAKE_CLUSTER/ssh_config node1`
works. Nothing outside of the namespaces is touched, and nothing is left when it ends.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

SUBNET = "10.77.0"


def missing():
    """Why fake hosts cannot be had here, or None."""
    if os.getuid() != 0:
        return "fake hosts need root (namespaces)"
    tools = [name for name in ("ip", "unshare", "nsenter", "ssh", "ssh-keygen") if shutil.which(name) is None]
    if not os.path.exists("/usr/sbin/sshd"):
        tools.append("sshd")
    if tools:
        return f"fake hosts need {', '.join(tools)}: apt-get install iproute2 openssh-server"
    trial = "ip link add t0 type veth peer name t1"
    found = subprocess.run(["unshare", "-n", "-m", "sh", "-c", trial], capture_output=True, text=True)
    return None if found.returncode == 0 else f"namespaces are not allowed here: {found.stderr.strip()}"


def _run(*words):
    subprocess.run(words, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)


class FakeCluster:
    """`number` hosts node0, node1, ...; this machine's part is called by its own name and has address 10.77.0.1."""

    def __init__(self, number):
        self.number = number
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="fake-cluster-"))
        self.ssh = self.folder / "ssh"
        self.daemons = {}
        # The anchors hold the namespaces: of the launcher's side, and of each node.
        self.base = self._anchor(["unshare", "-n", "-m", "--propagation", "private"])
        try:
            self._prepare()
            self.nodes = [self._make_node(i) for i in range(number)]
            for i in range(number):
                self.start_sshd(i)
            for i in range(number):
                self._wait_for(i)
        except BaseException:
            self.close()
            raise

    def _anchor(self, words):
        process = subprocess.Popen(
            [*words, sys.executable, "-S", "-c", "print(flush=True); import sys; sys.stdin.read()"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        process.stdout.readline()
        return process

    def inside(self, *words):
        """The words that run a command on the launcher's side of the cluster."""
        return ["nsenter", "-t", str(self.base.pid), "-n", "-m", f"--wd={os.getcwd()}", *map(str, words)]

    def on_node(self, i, *words):
        """The words that run a command on a node without ssh."""
        return ["nsenter", "-t", str(self.nodes[i].pid), "-n", "-m", "-u", "-i", *map(str, words)]

    def _prepare(self):
        folder = self.folder
        for name in ("hk", "id"):
            _run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name))
        shutil.copy(folder / "id.pub", folder / "authorized_keys")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/hk\nAuthorizedKeysFile {folder}/authorized_keys\nPermitRootLogin prohibit-password\n"
            "PasswordAuthentication no\nUsePAM no\nStrictModes no\nPrintMotd no\nMaxStartups 100:30:200\nPidFile none\n"
        )
        (folder / "ssh_config").write_text(
            f"Host *\n IdentityFile {folder}/id\n StrictHostKeyChecking no\n UserKnownHostsFile /dev/null\n"
            " LogLevel ERROR\n"
        )
        self.ssh.write_text(f'#!/bin/sh\nexec ssh -F {folder}/ssh_config "$@"\n')
        self.ssh.chmod(0o755)
        names = "".join(f"{SUBNET}.{10 + i} node{i}\n" for i in range(self.number))
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{SUBNET}.1 {os.uname().nodename}\n{names}")
        script = (
            "mount -t tmpfs tmpfs /run && mkdir -p /run/sshd && "
            f"mount --bind {folder}/hosts /etc/hosts && ip link set lo up && ip link add br0 type bridge && "
            f"ip addr add {SUBNET}.1/24 dev br0 && ip link set br0 up"
        )
        _run(*self.inside("sh", "-c", script))

    def _make_node(self, i):
        node = self._anchor(self.inside("unshare", "-n", "-m", "-u", "-i", "--propagation", "private"))
        script = (
            f"ip link add v{i} type veth peer name eth0 netns {node.pid} && ip link set v{i} master br0 up && "
            f"nsenter -t {node.pid} -n -u -m -i sh -c 'hostname node{i} && "
            f"ip addr add {SUBNET}.{10 + i}/24 dev eth0 && "
            "ip link set eth0 up && ip link set lo up && mount -t tmpfs tmpfs /dev/shm'"
        )
        _run(*self.inside("sh", "-c", script))
        return node

    def start_sshd(self, i):
        """Start (again) the way into a node."""
        log = open(self.folder / f"sshd.{i}.log", "ab")  # noqa: SIM115
        self.daemons[i] = subprocess.Popen(
            self.on_node(i, "/usr/sbin/sshd", "-D", "-e", "-f", self.folder / "sshd_config"),
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
        log.close()

    def _wait_for(self, i):
        for _ in range(100):
            if subprocess.run(self.inside(self.ssh, f"node{i}", "true"), capture_output=True).returncode == 0:
                return
            time.sleep(0.05)
        raise RuntimeError(f"node{i} does not answer: {(self.folder / f'sshd.{i}.log').read_text()}")

    def processes(self, i):
        """The processes in a node's network, without the anchor."""
        network = os.readlink(f"/proc/{self.nodes[i].pid}/ns/net")
        found = []
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != self.nodes[i].pid:
                with contextlib.suppress(OSError):
                    if os.readlink(f"/proc/{entry}/ns/net") == network:
                        found.append(int(entry))
        return found

    def kill_node(self, i):
        """Pull the plug: SIGKILL to all processes of a node, once all stand still: none reports the end of another."""
        for number in (signal.SIGSTOP, signal.SIGSTOP, *[signal.SIGKILL] * 3):
            for pid in self.processes(i):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        self.daemons[i].wait()

    def restart_node(self, i):
        """Bring a killed node back."""
        self.start_sshd(i)
        self._wait_for(i)

    def cable(self, i, state):
        """Pull (`down`) or plug in (`up`) a node's network cable."""
        _run(*self.inside("ip", "link", "set", f"v{i}", state))

    def close(self):
        """End every process of the cluster; the namespaces vanish with them."""
        for i in range(len(getattr(self, "nodes", []))):
            if i in self.daemons:
                self.kill_node(i)
        for anchor in [*getattr(self, "nodes", []), self.base]:
            anchor.stdin.close()
            anchor.stdout.close()
            anchor.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def main():
    with FakeCluster(int(sys.argv[1])) as cluster:
        command = sys.argv[sys.argv.index("--") + 1 :]
        environment = {**os.environ, "FAKE_CLUSTER": str(cluster.folder)}
        sys.exit(subprocess.run(cluster.inside(*command), env=environment).returncode)


if __name__ == "__main__":
    main()
