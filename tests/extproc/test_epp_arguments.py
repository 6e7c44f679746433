"""The arguments and the configuration file of other pickers: accepted, accepted without effect, or refused by name."""

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from dualmap.errors import PoolError
from dualmap_extproc.app.epp import epp
from dualmap_extproc.epp.other_flags import UNNEEDED, UnknownFlagError, read_arguments
from dualmap_extproc.epp.plugins import UNSUPPORTED, read_plugins

OWN = {"pool-name", "grpc-port", "v"}


def read(*arguments: str) -> tuple[str, ...]:
    return read_arguments(arguments, valued=OWN, boolean={"secure-serving"}).own


def unneeded(*arguments: str) -> tuple[str, ...]:
    return read_arguments(arguments, valued=OWN, boolean={"secure-serving"}).unneeded


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(epp, arguments)


class TestArguments:
    @pytest.mark.parametrize(
        "arguments",
        [("--pool-name", "a"), ("-pool-name", "a"), ("--pool-name=a",), ("-pool-name=a",)],
        ids=" ".join,
    )
    def test_arguments_with_one_or_two_hyphens_are_equal(self, arguments: tuple[str, ...]) -> None:
        assert read(*arguments) == ("--pool-name=a",)

    @pytest.mark.parametrize(
        ("arguments", "value"),
        [
            (("--secure-serving",), "true"),
            (("--secure-serving=T",), "true"),
            (("--secure-serving=false",), "false"),
            (("--secure-serving", "false"), "false"),
            (("-secure-serving=0",), "0"),
        ],
        ids=str,
    )
    def test_boolean_flag_takes_its_value_as_go_does(self, arguments: tuple[str, ...], value: str) -> None:
        assert read(*arguments, "--v", "4") == (f"--secure-serving={value}", "--v=4")

    def test_value_of_a_flag_may_look_like_a_flag(self) -> None:
        assert read("--pool-name", "--v") == ("--pool-name=--v",)

    @pytest.mark.parametrize("name", UNNEEDED)
    def test_known_flag_is_left_out_with_its_value(self, name: str) -> None:
        assert read(f"--{name}=true", "--v=1") == read(f"--{name}", "true", "--v=1") == ("--v=1",)
        assert unneeded(f"-{name}", "true") == (name,)

    def test_flags_of_llm_ds_picker_are_accepted(self) -> None:
        chart = "--allow-experimental-plugins", "--grpc-max-recv-msg-size=10MiB", "--tls-min-version", "VersionTLS12"
        assert read(*chart, "--v=1") == ("--v=1",)
        assert unneeded(*chart) == ("allow-experimental-plugins", "grpc-max-recv-msg-size", "tls-min-version")

    def test_flags_about_several_engine_types_are_accepted(self) -> None:
        gaie = "--enable-multi-engine", "--engine-label-key", "example.com/engine", "--v=1"
        assert read(*gaie) == ("--v=1",)
        assert unneeded(*gaie) == ("enable-multi-engine", "engine-label-key")

    def test_function_that_is_switched_off_needs_no_warning(self) -> None:
        arguments = "--tracing", "false", "--metrics-endpoint-auth=false", "--enable-pprof=false"
        assert unneeded(*arguments, "--enable-multi-engine=false") == ()

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("--no-such-flag=3",), "no such flag: '--no-such-flag'"),
            (("pool",), "'pool' is not a flag"),
            (("--",), "'--' is not a flag"),
            (("--pool-name",), "--pool-name needs a value"),
            (("--secure-serving=maybe",), "--secure-serving: 'maybe' is not accepted; give true or false"),
        ],
        ids=str,
    )
    def test_unknown_argument_is_refused_by_name(self, arguments: tuple[str, ...], said: str) -> None:
        with pytest.raises(UnknownFlagError) as refused:
            read(*arguments)
        assert str(refused.value) == said


class TestPlugins:
    def config(self, *types: str, **fields: object) -> dict[str, object]:
        head = {"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}
        return {**head, "plugins": [{"type": each} for each in types], **fields}

    def test_known_plugins_are_accepted(self) -> None:
        profiles = [{"name": "default", "plugins": [{"pluginRef": "queue-scorer", "weight": 2}]}]
        config = self.config("queue-scorer", "prefix-cache-scorer", "queue-scorer", schedulingProfiles=profiles)
        assert read_plugins([config]) == ("queue-scorer", "prefix-cache-scorer")

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_plugin_that_cannot_be_left_out_is_refused(self, name: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_plugins([self.config("queue-scorer", name)])
        assert (refused.value.field, refused.value.value) == ("plugins[1].type", name)

    def test_parsers_of_http_requests_are_accepted(self) -> None:
        parsers = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser")
        config = self.config(*parsers, requestHandler={"parsers": [{"pluginRef": each} for each in parsers]})
        assert read_plugins([config]) == parsers

    def test_decode_filter_without_prefill_has_no_effect(self) -> None:
        profiles = [{"name": "default", "plugins": [{"pluginRef": "decode-filter"}]}]
        config = self.config("prefix-cache-scorer", "decode-filter", schedulingProfiles=profiles)
        assert read_plugins([config]) == ("prefix-cache-scorer", "decode-filter")

    @pytest.mark.parametrize("name", ["prefill", "encode"])
    def test_profile_for_other_pods_is_refused_by_name(self, name: str) -> None:
        config = self.config("decode-filter", schedulingProfiles=[{"name": "decode"}, {"name": name}])
        with pytest.raises(PoolError, match="decode-filter is the only plugin for these roles") as refused:
            read_plugins([config])
        assert (refused.value.field, refused.value.value) == ("schedulingProfiles[1].name", name)

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"plugins": [{"type": "my-scorer"}]}, "plugins[0].type"),
            ({"plugins": [{"type": 3}]}, "plugins[0].type"),
            ({"plugins": ["queue-scorer"]}, "plugins[0]"),
            ({"plugins": {}, "pluginz": []}, "pluginz"),
            ({"plugins": "queue-scorer"}, "plugins"),
            ({"kind": "Pod"}, "kind"),
            ({"apiVersion": "v2"}, "apiVersion"),
        ],
        ids=str,
    )
    def test_invalid_configuration_is_refused_by_field(self, changes: dict[str, object], field: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_plugins([self.config(**changes)])
        assert refused.value.field == field


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            ((), "give --pool-name NAME, or --endpoint-selector"),
            (("--pool-name", "a", "--endpoint-selector", "a=b"), "give --pool-name NAME, or --endpoint-selector"),
            (("--pool-name", ""), "give --pool-name NAME, or --endpoint-selector"),
            (("--endpoint-selector", "a=b"), "require each other; give both or neither"),
            (("--endpoint-selector", "a", "--endpoint-target-ports", "0"), "give 1 to 8 ports"),
            (("--endpoint-selector", "a b=c", "--endpoint-target-ports", "1"), "--endpoint-selector: 'a b'"),
            (("--pool-name", "a", "--pool-group", "b"), "inference.networking.x-k8s.io"),
            (("--pool-name", "a", "--shiny"), "no such flag: '--shiny'"),
            (("--pool-name", "a", "--shiny"), "; accepted: --als-port, --cert-path"),
            (
                ("--pool-name", "a", "--config-file", "/nowhere"),
                "--config-file /nowhere: No such file or directory; give a readable file",
            ),
            (("--pool-name", "a", "--config-text", "a: ["), "--config-text: line 2"),
            (("--pool-name", "a", "--config-text", "{}", "--config-file", "b"), "exclude each other"),
            (("--pool-name", "a", "--routing", "/nowhere"), "--routing /nowhere: No such file"),
            (("--pool-name", "a", "--kubeconfig", "/nowhere"), "--kubeconfig /nowhere: No such file or"),
            (
                ("--pool-name", "a", "--cert-path", "/nowhere"),
                "--cert-path /nowhere: tls.crt: No such file or directory; give",
            ),
            (("--pool-name", "a", "--zap-log-level", "loud"), "--zap-log-level: 'loud' is not accepted"),
            (("--pool-name", "a", "--metrics-port", "9003"), "--grpc-health-port and --metrics-port are both 9003"),
        ],
        ids=str,
    )
    def test_command_refuses_invalid_arguments(self, arguments: tuple[str, ...], said: str) -> None:
        result = invoke(*arguments)
        assert result.exit_code == 2
        (line,) = [each for each in result.output.splitlines() if each.startswith("Error: ")]
        assert said in line
        assert result.output.endswith(f"{line}\n")

    @pytest.mark.parametrize(
        ("arguments", "dashboard"),
        [
            ((), True),
            (("--dashboard=false",), False),
            (("-dashboard", "0"), False),
            (("--dashboard=true",), True),
            (("--no-dashboard",), False),
            (("--no-dashboard=false",), True),
        ],
        ids=str,
    )
    def test_flag_with_a_value_of_false_is_switched_off(self, arguments: tuple[str, ...], dashboard: bool) -> None:
        context = epp.make_context("epp", ["--pool-name", "a", *arguments])
        assert context.params["dashboard"] is dashboard

    def test_command_refuses_plugins_by_name(self, tmp_path: Path) -> None:
        file = tmp_path / "plugins.yaml"
        file.write_text(
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
            "plugins: [{type: decode-filter}, {type: prefill-filter}]"
        )
        result = invoke("--pool-name", "a", "--config-file", str(file))
        assert result.exit_code == 2
        assert f"--config-file {file}: plugins[1].type: 'prefill-filter'" in result.output
        assert "not supported" in result.output

    def test_command_refuses_an_invalid_routing_file(self, tmp_path: Path) -> None:
        file = tmp_path / "routing.yaml"
        file.write_text("spec: {routing: {policy: best}}")
        result = invoke("--pool-name", "a", "--routing", str(file))
        assert result.exit_code == 2
        assert f"--routing {file}: spec.routing.policy: 'best'" in result.output

    @pytest.mark.parametrize("flag", ["--help", "-h", "-help"])
    def test_command_explains_itself(self, flag: str) -> None:
        result = invoke(flag)
        assert result.exit_code == 0
        assert "takes the place of the picker" in result.output
