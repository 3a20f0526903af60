"""Hosts: their lists, files and variables, and the ranks that fit on them."""

import os
import socket

import pytest
from dbrdist_launch.backends import hosts, slurm
from dbrdist_launch.backends.job import Host
from dbrdist_launch.errors import LaunchError


def test_hosts_that_cannot_be_are_refused(tmp_path):
    assert hosts.checked("a-b.c_1", "2") == Host("a-b.c_1", 2) == hosts.checked("a-b.c_1", 2)
    for name in ("-a", "", "a b", "a;b"):
        with pytest.raises(LaunchError, match="is not a host name"):
            hosts.checked(name, 1)
    for slots in ("0", 0, "x", "-1", ""):
        with pytest.raises(LaunchError, match="expected a number of slots of at least 1 after the colon"):
            hosts.checked("a", slots)
    for text in ("", "# nothing\n\n"):
        (tmp_path / "hosts").write_text(text)
        with pytest.raises(LaunchError, match="names no host"):
            hosts.parse_file(str(tmp_path / "hosts"))
    (tmp_path / "hosts").write_text("a:2 # one\na slots=3 max_slots=4\nb 5\nc\n")
    assert hosts.parse_file(str(tmp_path / "hosts")) == (Host("a", 5), Host("b", 5), Host("c", 1))
    (tmp_path / "hosts").write_bytes(b"\xef\xbb\xbfa:2\r\n# \xe9\r\nb\r\n")  # as some editors write it
    assert hosts.parse_file(str(tmp_path / "hosts")) == (Host("a", 2), Host("b", 1))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.parse_file(str(tmp_path / "nowhere"))


def test_the_hosts_of_grid_engine_have_one_slot_where_none_are_given(tmp_path):
    (tmp_path / "hosts").write_text("a 2 q@a x\n\nb\na 3\n")
    assert hosts.of_environment({"PE_HOSTFILE": str(tmp_path / "hosts")}) == (Host("a", 5), Host("b", 1))


@pytest.mark.parametrize("name", ["PBS_NODEFILE", "LSB_DJOB_HOSTFILE", *hosts._OPERATOR_FILES])
def test_host_files_of_batch_systems_are_read_where_they_are(tmp_path, name):
    (tmp_path / "hosts").write_text("a:2\n")
    assert hosts.of_environment({name: str(tmp_path / "hosts")}) == (Host("a", 2),)
    for path in ("", str(tmp_path / "nowhere")):
        assert hosts.of_environment({name: path}) == ()
    assert hosts.of_environment({"LSB_MCPU_HOSTS": "a 2 b 3"}) == (Host("a", 2), Host("b", 3))


def test_names_of_slurm_in_their_short_form():
    assert hosts.expand("n[1-3,07],login") == ["n1", "n2", "n3", "n07", "login"]
    assert hosts.expand("n[09-10]x") == ["n09x", "n10x"] and hosts.expand("n[5]") == ["n5"]
    assert hosts.expand("a[1-2]b[3-4]") == ["a1b3", "a1b4", "a2b3", "a2b4"] and hosts.expand("n[3-2]") == []
    assert hosts.expand("n[900000-900001]") == ["n900000", "n900001"]
    for text in ("n[a]", "n[1-b]", "n[]", "n[-1]", f"n[1-{(1 << 20) + 2}]"):
        with pytest.raises(LaunchError, match=": expected a form such as"):
            hosts.expand(text)


def test_the_address_of_a_host_is_the_first_that_the_system_names(monkeypatch):
    def named(name, port, type=0):
        assert (port, type) == (None, socket.SOCK_STREAM)
        return [(2, 1, 6, "", ("10.0.0.7", 0)), (10, 1, 6, "", ("fd00::7", 0, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", named)
    assert hosts.resolve("a") == "10.0.0.7"
    for error in (socket.gaierror("unknown"), OSError(), UnicodeError()):
        monkeypatch.setattr(socket, "getaddrinfo", lambda *given, error=error, **more: (_ for _ in ()).throw(error))
        assert hosts.resolve("a") is None


def test_ranks_fit_into_slots():
    pair = (Host("a", 2), Host("b", 3))
    assert hosts.place(pair, 5, None) == (pair, 5) == hosts.place(pair, None, None)
    assert hosts.place(pair, 2, None) == ((Host("a", 2),), 2)
    assert hosts.place(pair, 3, None) == ((Host("a", 2), Host("b", 1)), 3)
    assert hosts.place(pair, None, 4) == ((Host("a", 4), Host("b", 4)), 8)
    with pytest.raises(LaunchError, match=r"6 ranks do not fit into 5 slots \(a:2, b:3\); .* --hosts a:3,\.\.\.,"):
        hosts.place(pair, 6, None)


def test_host_lists_and_files(tmp_path):
    assert hosts.parse_list("a:2,b,a:1") == (Host("a", 3), Host("b", 1))
    path = tmp_path / "hosts"
    path.write_text("# two forms\na:4\nb slots=2 max_slots=4\nc 3\nd\nd\n\n")
    assert hosts.parse_file(str(path)) == (Host("a", 4), Host("b", 2), Host("c", 3), Host("d", 2))
    with pytest.raises(LaunchError, match="cannot be read"):
        hosts.parse_file(str(tmp_path / "none"))
    with pytest.raises(LaunchError, match="at least 1"):
        hosts.parse_list("a:0")


def test_hosts_of_batch_systems(tmp_path):
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    for name in ("PBS_NODEFILE", "LSB_DJOB_HOSTFILE", "HYDRA_HOST_FILE", "OMPI_MCA_orte_default_hostfile"):
        assert hosts.of_environment({name: str(nodes)}) == (Host("n1", 2), Host("n2", 1))
    assert hosts.of_environment({"LSB_MCPU_HOSTS": "n1 4 n2 2"}) == (Host("n1", 4), Host("n2", 2))
    assert hosts.of_environment({}) == ()
    slurm_variables = {"SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x2),1"}
    assert slurm.allocation(slurm_variables) == (Host("n1", 2), Host("n2", 2), Host("n3", 1))


def test_slurm_names_expand():
    assert hosts.expand("n[1-3,07],login") == ["n1", "n2", "n3", "n07", "login"]
    assert hosts.expand("r[1-2]n[08-09]") == ["r1n08", "r1n09", "r2n08", "r2n09"]


def test_ranks_are_placed_in_order_and_do_not_overflow():
    two = (Host("a", 2), Host("b", 2))
    assert hosts.place(two, 3, None) == ((Host("a", 2), Host("b", 1)), 3)
    assert hosts.place(two, None, 1) == ((Host("a", 1), Host("b", 1)), 2)
    with pytest.raises(LaunchError, match="5 ranks do not fit into 4 slots"):
        hosts.place(two, 5, None)


def test_words_of_host_files_that_are_not_used_are_named(tmp_path):
    path, said = tmp_path / "hosts", []
    path.write_text("a slots=2 user=joe max_slots=4\nb:1 port=22\n")
    assert hosts.parse_file(str(path), said.append) == (Host("a", 2), Host("b", 1))
    assert len(said) == 1 and "user=joe, port=22 not used here" in said[0]


def test_own_addresses_are_those_of_all_interfaces_that_have_one_loopback_last(monkeypatch):
    known = {"lo": "127.0.0.1", "eth0": "10.0.0.7", "ib0": "192.168.1.7"}

    def address_of_interface(name):
        if name not in known:
            raise LaunchError(f"{name} has no address")
        return known[name]

    monkeypatch.setattr(hosts, "address_of_interface", address_of_interface)
    monkeypatch.setattr(hosts.socket, "if_nameindex", lambda: list(enumerate(["lo", "eth0", "tun0", "ib0"])))
    assert hosts.own_addresses() == ("10.0.0.7", "192.168.1.7", "127.0.0.1")


@pytest.mark.parametrize(
    ("name", "address", "bound"),
    [
        ("localhost", None, None), (os.uname().nodename, None, None), ("nowhere", None, None),
        ("here", "10.0.0.7", (socket.AF_INET, "10.0.0.7", True)),
        ("six", "fe80::7", (socket.AF_INET6, "fe80::7", True)),
        ("there", "10.0.0.8", (socket.AF_INET, "10.0.0.8", False)),
    ],
)  # fmt: skip
def test_a_name_is_ours_whose_address_can_be_bound(monkeypatch, name, address, bound):
    asked = []

    class Probe:
        def __init__(self, family, kind):
            assert kind == socket.SOCK_DGRAM
            self.family = family

        def __enter__(self):
            return self

        def __exit__(self, *error):
            asked.append("closed")

        def bind(self, place):
            asked.append((self.family, place))
            if not bound[2]:
                raise OSError(99, "Cannot assign requested address")

    monkeypatch.setattr(hosts, "resolve", lambda name: address)
    monkeypatch.setattr(hosts.socket, "socket", Probe)
    assert hosts.is_local(name) is (name != "nowhere" if bound is None else bound[2])
    assert asked == ([] if bound is None else [(bound[0], (bound[1], 0)), "closed"])
