"""The arguments and the configuration file of other pickers: accepted, accepted without effect, or refused by name."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dualmap.errors import PoolError
from dualmap_extproc.app.epp import epp
from dualmap_extproc.epp.other_flags import UNNEEDED, UnknownFlagError, read_arguments
from dualmap_extproc.epp.plugins import UNSUPPORTED, read_plugins
from dualmap_extproc.epp.prefills import ANY_ROLE, RoleUse

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
    def config(self, *types: str, **fields: object) -> dict[str, Any]:
        head = {"apiVersion": "inference.networking.x-k8s.io/v1alpha1", "kind": "EndpointPickerConfig"}
        return {**head, "plugins": [{"type": each} for each in types], **fields}

    def test_known_plugins_are_accepted(self) -> None:
        profiles = [{"name": "default", "plugins": [{"pluginRef": "queue-scorer", "weight": 2}]}]
        config = self.config("queue-scorer", "prefix-cache-scorer", schedulingProfiles=profiles)
        config["plugins"] += [{"type": "queue-scorer", "name": "second", "parameters": {"any": 1}}]
        read = read_plugins([config])
        assert (read.unneeded, read.roles) == (("queue-scorer", "prefix-cache-scorer"), ANY_ROLE)

    @pytest.mark.parametrize("name", UNSUPPORTED)
    def test_plugin_that_cannot_be_left_out_is_refused(self, name: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_plugins([self.config("queue-scorer", name)])
        assert (refused.value.field, refused.value.value) == ("plugins[1].type", name)

    def test_parsers_of_http_requests_are_accepted(self) -> None:
        parsers = ("openai-parser", "anthropic-parser", "vllmhttp-parser", "sglanghttp-parser")
        config = self.config(*parsers, requestHandler={"parsers": [{"pluginRef": each} for each in parsers]})
        assert read_plugins([config]).unneeded == parsers

    def test_decode_filter_without_prefill_respects_the_roles_of_pods(self) -> None:
        profiles = [{"name": "default", "plugins": [{"pluginRef": "decode-filter"}]}]
        read = read_plugins([self.config("prefix-cache-scorer", "decode-filter", schedulingProfiles=profiles)])
        assert (read.unneeded, read.roles) == (("prefix-cache-scorer",), RoleUse(respected=True))

    @pytest.mark.parametrize("name", ["encode-filter", "header-profile-handler", "topology-affinity-filter"])
    def test_plugin_for_other_stages_or_places_is_refused_with_what_to_do(self, name: str) -> None:
        with pytest.raises(PoolError, match=f"'{name}' is not accepted; give (a|another|disagg)") as refused:
            read_plugins([self.config("decode-filter", name)])
        assert refused.value.field == "plugins[1].type"

    def test_profile_for_encoders_is_refused_by_name(self) -> None:
        config = self.config("decode-filter", schedulingProfiles=[{"name": "decode"}, {"name": "encode"}])
        with pytest.raises(PoolError, match="a configuration without encode-filter and its profile") as refused:
            read_plugins([config])
        assert (refused.value.field, refused.value.value) == ("schedulingProfiles[1].name", "encode")

    @pytest.mark.parametrize(
        ("changes", "field"),
        [
            ({"plugins": [{"type": "my-scorer"}]}, "plugins[0].type"),
            ({"plugins": [{"type": 3}]}, "plugins[0].type"),
            ({"plugins": ["queue-scorer"]}, "plugins[0]"),
            ({"plugins": {}, "pluginz": []}, "pluginz"),
            ({"plugins": "queue-scorer"}, "plugins"),
            ({"plugins": {}}, "plugins"),
            ({"plugins": [{"type": "queue-scorer", "weight": 2}]}, "plugins[0].weight"),
            ({"plugins": [{"type": "queue-scorer", "name": 3}]}, "plugins[0].name"),
            ({"plugins": [{"type": "queue-scorer"}, {"type": "queue-scorer"}]}, "plugins[1].name"),
            ({"kind": "Pod"}, "kind"),
            ({"kind": None}, "kind"),
            ({"apiVersion": "v2"}, "apiVersion"),
            ({"apiVersion": "llm-d.ai/v1"}, "apiVersion"),
            ({"apiVersion": "llm-d.ai/v1alpha2"}, "apiVersion"),
            ({"schedulingProfiles": "decode"}, "schedulingProfiles"),
            ({"schedulingProfiles": {"name": "decode"}}, "schedulingProfiles"),
            ({"schedulingProfiles": ["decode"]}, "schedulingProfiles[0]"),
            ({"schedulingProfiles": [{"plugins": []}]}, "schedulingProfiles[0].name"),
            ({"schedulingProfiles": [{"name": "a"}, {"name": "a"}]}, "schedulingProfiles[1].name"),
            ({"schedulingProfiles": [{"name": "a", "plugin": []}]}, "schedulingProfiles[0].plugin"),
            ({"schedulingProfiles": [{"name": "a", "plugins": {}}]}, "schedulingProfiles[0].plugins"),
            (
                {"schedulingProfiles": [{"name": "a", "plugins": [{"pluginRef": "decode-filter"}]}]},
                "schedulingProfiles[0].plugins[0].pluginRef",
            ),
            (
                {"schedulingProfiles": [{"name": "a", "plugins": [{"pluginRef": "queue-scorer", "weight": "2"}]}]},
                "schedulingProfiles[0].plugins[0].weight",
            ),
        ],
        ids=str,
    )
    def test_invalid_configuration_is_refused_by_field(self, changes: dict[str, object], field: str) -> None:
        with pytest.raises(PoolError) as refused:
            read_plugins([self.config(**changes)])
        assert refused.value.field == field

    def test_configuration_without_version_and_kind_is_accepted(self) -> None:
        assert read_plugins([{"plugins": [{"type": "queue-scorer"}]}]).unneeded == ("queue-scorer",)

    def test_profile_may_name_a_default_plugin(self) -> None:
        profiles = [{"name": "default", "plugins": [{"pluginRef": "max-score-picker"}]}]
        assert read_plugins([self.config("queue-scorer", schedulingProfiles=profiles)]).unneeded == ("queue-scorer",)


HEAD = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}
PROFILES = [{"name": "prefill", "plugins": []}, {"name": "decode", "plugins": []}]


class TestPrefills:
    """llm-d's plugins for prefill and decode on different pods, as its documentation combines them."""

    def roles(self, handler: dict[str, Any], *deciders: dict[str, Any]) -> RoleUse:
        filters = [{"type": "prefill-filter"}, {"type": "decode-filter"}]
        plugins = [*filters, *deciders, handler]
        read = read_plugins([{**HEAD, "plugins": plugins, "schedulingProfiles": PROFILES}])
        assert (read.unneeded, read.unused) == ((), ())
        return read.roles

    def by_prefix(self, tokens: object, **fields: object) -> dict[str, Any]:
        return {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": tokens}, **fields}

    def handler(self, **parameters: object) -> dict[str, Any]:
        return {"type": "disagg-profile-handler", "parameters": parameters}

    def test_decider_by_prefix_gives_the_least_uncached_tokens(self) -> None:
        handler = self.handler(deciders={"prefill": "prefix-based-pd-decider"})
        assert self.roles(handler, self.by_prefix(16)) == RoleUse(respected=True, prefill_min_tokens=16)

    def test_decider_is_found_by_its_own_name(self) -> None:
        long = self.by_prefix(512, name="long")
        handler = self.handler(deciders={"prefill": "long"})
        assert self.roles(handler, self.by_prefix(16), long).prefill_min_tokens == 512

    def test_decider_that_always_prefills_elsewhere_gives_one_token(self) -> None:
        handler = self.handler(deciders={"prefill": "always-disagg-pd-decider"})
        assert self.roles(handler, {"type": "always-disagg-pd-decider"}).prefill_min_tokens == 1

    @pytest.mark.parametrize(
        "parameters",
        [{}, {"deciderPluginName": "prefix-based-pd-decider", "primaryPort": 8000}, {"deciderPluginName": "no"}],
        ids=str,
    )
    def test_older_handler_and_its_parameters_are_read(self, parameters: dict[str, Any]) -> None:
        handler = {"type": "pd-profile-handler", "parameters": parameters}
        deciders = self.by_prefix(64), self.by_prefix(64, name="no")
        assert self.roles(handler, *deciders, {"type": "prefill-header-handler"}).prefill_min_tokens == 64

    @pytest.mark.parametrize(
        ("handler", "decider"),
        [
            ({"type": "disagg-profile-handler"}, 16),
            ({"type": "disagg-profile-handler", "parameters": {"deciders": {"prefill": "prefix-based-pd-decider"}}}, 0),
            ({"type": "single-profile-handler"}, 16),
        ],
        ids=str,
    )
    def test_without_an_effective_decider_decode_pods_compute_all_prompts(
        self, handler: dict[str, Any], decider: int
    ) -> None:
        plugins = [{"type": "decode-filter"}, {"type": "prefill-filter"}, self.by_prefix(decider), handler]
        config = {**HEAD, "plugins": plugins, "schedulingProfiles": PROFILES}
        assert read_plugins([config]).roles == RoleUse(respected=True)

    @pytest.mark.parametrize(
        ("handler", "tokens", "said"),
        [
            ({"deciders": "prefix-based-pd-decider"}, 16, "plugins[3].parameters.deciders: 'prefix-based-pd-decider'"),
            ({"deciders": {"prefil": "any"}}, 16, "plugins[3].parameters.deciders.prefil: 'any' is not accepted"),
            ({"decider": "any"}, 16, "give a parameter of disagg-profile-handler: deciderPluginName, deciders"),
            ({"deciderPluginName": "none"}, 16, "plugins[3].parameters.deciderPluginName: 'none'"),
            ({"prefillDeciderPluginName": "none"}, 16, "plugins[3].parameters.prefillDeciderPluginName: 'none'"),
            ({"deciders": {}, "decodeProfile": "decode"}, 16, "or with the older parameters: decodeProfile"),
            ({"profiles": {"decode": "generate"}}, 16, "schedulingProfiles: ['decode', 'prefill'] is not accepted"),
            ({"profiles": {"decode": 3}}, 16, "plugins[3].parameters.profiles.decode: 3"),
            ({"deciders": {"prefill": "none"}}, 16, "plugins[3].parameters.deciders.prefill: 'none'"),
            (
                {"deciders": {"prefill": "decode-filter"}},
                16,
                "the name of a plugin in plugins, of the type prefix-based-pd-decider",
            ),
            ({"stageOrder": "prefill-first"}, 16, "plugins[3].parameters.stageOrder: 'prefill-first'"),
            ({"deciders": {"encode": "any"}}, 16, "plugins[3].parameters.deciders.encode: 'any'"),
            ({"encodeDeciderPluginName": "any"}, 16, "pods that only encode are not supported"),
            ({"deciders": {"prefill": "prefix-based-pd-decider"}}, -1, "plugins[2].parameters.nonCachedTokens: -1"),
            ({"deciders": {"prefill": "prefix-based-pd-decider"}}, "16", "a whole number from 0 to 100000000"),
            ({"deciders": {"prefill": "prefix-based-pd-decider"}}, True, "a whole number from 0 to 100000000"),
        ],
        ids=str,
    )
    def test_invalid_parameter_is_refused_by_its_field(
        self, handler: dict[str, Any], tokens: object, said: str
    ) -> None:
        with pytest.raises(PoolError) as refused:
            self.roles(self.handler(**handler), self.by_prefix(tokens))
        assert said in str(refused.value)

    def test_configuration_of_a_picker_for_prefills_only_is_refused(self) -> None:
        with pytest.raises(PoolError, match=r"plugins\[1\].type: 'prefill-filter'"):
            read_plugins([{**HEAD, "plugins": [{"type": "queue-scorer"}, {"type": "prefill-filter"}]}])

    def test_parameters_that_are_no_mapping_are_refused(self) -> None:
        with pytest.raises(PoolError, match=r"plugins\[2\].parameters"):
            self.roles({"type": "disagg-profile-handler", "parameters": "prefill"})

    def test_older_handler_without_a_decider_names_the_missing_parameter(self) -> None:
        with pytest.raises(PoolError) as refused:
            self.roles({"type": "pd-profile-handler"})
        assert (refused.value.field, refused.value.shown) == ("plugins[2].parameters.deciderPluginName", "nothing")
        assert "a plugin with the name prefix-based-pd-decider is needed" in str(refused.value)

    @pytest.mark.parametrize(
        ("decider", "unknown"),
        [
            ({"type": "prefix-based-pd-decider", "parameters": {"nonCachedToken": 16}}, "nonCachedToken"),
            ({"type": "disagg-headers-handler", "parameters": {"decodeProfile": "decode"}}, "decodeProfile"),
        ],
        ids=str,
    )
    def test_unknown_parameter_is_refused_with_the_known_ones(self, decider: dict[str, Any], unknown: str) -> None:
        with pytest.raises(PoolError, match=f"give a parameter of {decider['type']}: ") as refused:
            self.roles(self.handler(), decider)
        assert refused.value.field == f"plugins[2].parameters.{unknown}"

    @pytest.mark.parametrize("order", ["decode-first", "Decode_First", "decode", "", None])
    def test_order_of_stages_is_read_as_llm_d_does(self, order: str | None) -> None:
        assert self.roles(self.handler(stageOrder=order)) == RoleUse(respected=True)

    @pytest.mark.parametrize(
        ("handler", "profiles", "tokens"),
        [
            ({}, ["decode"], None),
            ({"prefill": "p"}, ["decode", "prefill"], None),
            ({"prefill": "p"}, ["decode", "p"], 16),
        ],
        ids=str,
    )
    def test_decider_needs_the_profile_for_prefills(
        self, handler: dict[str, str], profiles: list[str], tokens: int | None
    ) -> None:
        plugins = [
            {"type": "decode-filter"},
            self.by_prefix(16),
            self.handler(profiles=handler, deciders={"prefill": "prefix-based-pd-decider"}),
        ]
        named = [{"name": each} for each in profiles]
        read = read_plugins([{**HEAD, "plugins": plugins, "schedulingProfiles": named}])
        assert read.roles == RoleUse(respected=True, prefill_min_tokens=tokens)
        missing = f"plugins[1]: schedulingProfiles has no profile with the name {handler.get('prefill', 'prefill')}"
        assert read.unused == ((missing,) if tokens is None else ())

    @pytest.mark.parametrize(
        ("plugin", "unused"),
        [
            (
                {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16, "promptTokens": 32}},
                "plugins[0].parameters.promptTokens: only uncached tokens count, against nonCachedTokens",
            ),
            ({"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16, "promptTokens": 16}}, None),
            (
                {"type": "always-disagg-pd-decider", "name": "prefix-based-pd-decider", "parameters": {"tokens": 16}},
                "plugins[0].parameters: always-disagg-pd-decider has no parameters",
            ),
        ],
        ids=str,
    )
    def test_parameter_without_effect_is_reported(self, plugin: dict[str, Any], unused: str | None) -> None:
        plugins = [plugin, self.handler(deciders={"prefill": "prefix-based-pd-decider"})]
        read = read_plugins([{**HEAD, "plugins": plugins, "schedulingProfiles": PROFILES}])
        assert read.unused == (() if unused is None else (unused,))


class TestLlmDsCharts:
    """What `helm template` makes of llm-d's charts 0.9.0 (llm-d-router-gateway and -standalone)."""

    # The plugins of the default configuration, and those that the value latencyPredictor.enabled adds.
    DEFAULT = ("queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "metrics-data-source")
    PREDICTED = (
        *("core-metrics-extractor", "predicted-latency-producer", "prefix-cache-affinity-filter", "latency-scorer"),
        *("weighted-random-picker", "slo-headroom-tier-filter", "latency-slo-admitter"),
    )

    @pytest.mark.parametrize(
        ("more", "single_destination"),
        [
            ((), False),
            (("--ha-enable-leader-election", "--metrics-endpoint-auth=false", "--v=2"), False),
            (("--single-destination=true",), True),
        ],
        ids=["one-replica", "replicas-without-metrics-authentication", "standalone"],
    )
    def test_arguments_are_accepted(self, more: tuple[str, ...], single_destination: bool) -> None:
        chart = [
            *("--pool-name", "qwen", "--pool-namespace", "llm", "--pool-group", "inference.networking.k8s.io"),
            *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml"),
            *("--grpc-health-port", "9003", "--tracing=false"),
        ]
        parameters = epp.make_context("epp", [*chart, *more]).params
        assert (parameters["pool_name"], parameters["pool_namespace"]) == ("qwen", "llm")
        assert parameters["config_file"] == Path("/config/default-plugins.yaml")
        assert parameters["single_destination"] is single_destination

    def test_default_configurations_have_no_effect(self) -> None:
        plugins: list[dict[str, Any]] = [{"type": each} for each in self.DEFAULT]
        plugins[-1]["parameters"] = {"scheme": "http", "path": "/metrics", "insecureSkipVerify": True}
        # The chart uses one type twice, by names.
        affinity = [
            {"name": f"{name}-affinity-filter", "type": "prefix-cache-affinity-filter"} for name in ("strict", "loose")
        ]
        plugins += [*({"type": each} for each in self.PREDICTED), *affinity]
        read = read_plugins([{**HEAD, "plugins": plugins, "schedulingProfiles": [{"name": "default", "plugins": []}]}])
        assert (read.unneeded, read.roles) == ((*self.DEFAULT, *self.PREDICTED), ANY_ROLE)


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
            "plugins: [{type: decode-filter}, {type: encode-filter}]"
        )
        result = invoke("--pool-name", "a", "--config-file", str(file))
        assert result.exit_code == 2
        assert f"--config-file {file}: plugins[1].type: 'encode-filter'" in result.output
        assert "pods that only encode are not supported" in result.output

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
