"""The chart values for the tests of invariants: each setting, alone and with related settings."""

from collections.abc import Mapping
from typing import Any

SERVICE_MONITOR = "monitoring.coreos.com/v1/ServiceMonitor"
POD_MONITOR = "monitoring.coreos.com/v1/PodMonitor"
PROMETHEUS_RULE = "monitoring.coreos.com/v1/PrometheusRule"
CERTIFICATE = "cert-manager.io/v1/Certificate"
SCALED_OBJECT = "keda.sh/v1alpha1/ScaledObject"
GAIE_POOL = "inference.networking.k8s.io/v1/InferencePool"
DESTINATION_RULE = "networking.istio.io/v1/DestinationRule"
APIS = (SERVICE_MONITOR, POD_MONITOR, PROMETHEUS_RULE, CERTIFICATE, SCALED_OBJECT, GAIE_POOL, DESTINATION_RULE)

POOLS = [{"pool": "qwen", "namespace": "llm", "minReplicas": 2, "maxReplicas": 16}]
GATEWAYS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "gateways"}}}]
SETTINGS = {"routing": {"policy": "dualmap"}, "slo": {"ttft": "2s"}, "engine": {"type": "SGLang"}}
GAIE = {
    "mode": "gaie",
    "gaie": {
        "pools": [
            {"name": "qwen", "namespace": "llm", "inferencePool": {"selector": {"app": "qwen"}}},
            {"name": "other", "replicas": 3, "settings": SETTINGS},
        ]
    },
}
PLACED = {
    "topologySpread": {"topologyKeys": ["topology.kubernetes.io/zone"], "whenUnsatisfiable": "DoNotSchedule"},
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "cpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {}},
    "priorityClassName": "high",
    "podAnnotations": {"a": "b"},
}
# The scheduling settings of the bundled Redis, which is a single pod.
PLACED_ALONE = {key: PLACED[key] for key in ("nodeSelector", "tolerations", "affinity", "priorityClassName")}
ISSUER = {"name": "ours", "kind": "ClusterIssuer", "group": "cert-manager.io"}
SECRET_TLS = {"mode": "secret", "mutual": True, "secretName": "routers", "gatewaySecretName": "envoys"}
HEADERS = {
    "name": "OTEL_EXPORTER_OTLP_HEADERS",
    "valueFrom": {"secretKeyRef": {"name": "otlp", "key": "headers"}},
}

RECORD = {
    "enabled": True,
    "volume": {"persistentVolumeClaim": {"claimName": "recordings"}},
    "sample": 0.1,
    "max": "2GB",
    "keySecretName": "recordings-key",
}
TOKENIZERS = [
    {
        "name": "qwen",
        "volume": {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
        "subPath": "Qwen3-8B",
    },
    {"name": "llama", "volume": {"image": {"reference": "registry.example.com/tokenizers:1"}}},
]
RENDERER = {
    "name": "qwen",
    "image": "registry.example.com/vllm:0.33.0",
    "command": ["vllm-rs"],
    "args": ["render", "/etc/dualmap/tokenizers/qwen", "--served-model-name", "Qwen/Qwen3-8B", "--port", "8010"],
}

CASES: Mapping[str, Mapping[str, Any]] = {
    "defaults": {},
    "namespaced": {"watchNamespace": "llm"},
    "in its own namespace": {"watchNamespace": "dualmap-system"},
    "model names": {"models": {"gpt-prod": "prod", "Qwen/Qwen2.5-7B": "llm"}},
    "named otherwise": {"fullnameOverride": "other"},
    "digests": {
        "image": {"digest": f"sha256:{'0' * 64}", "registry": "", "pullSecrets": ["pull"], "pullPolicy": "Always"},
        "gateway": {"bundled": {"image": {"digest": f"sha256:{'1' * 64}", "tag": ""}}},
    },
    "openshift": {"podSecurity": {"runAsUser": None}, "rbac": {"ownerReferences": True}},
    "run by another user": {"podSecurity": {"runAsUser": 1000650000}},
    "crds kept elsewhere": {"crds": {"enabled": False}},
    "crds that go": {"crds": {"keep": False}},
    "placed": {
        "operator": PLACED,
        "router": PLACED,
        "gateway": {"bundled": PLACED},
        "redis": {"bundled": PLACED_ALONE},
    },
    "nowhere in particular": {"router": {"topologySpread": {"topologyKeys": []}}},
    "one of each": {"operator": {"replicas": 1}, "router": {"replicas": 1}, "gateway": {"bundled": {"replicas": 1}}},
    "generated mutual tls": {"router": {"tls": {"mode": "generated"}}},
    "tls off": {"router": {"tls": {"mode": "none"}}},
    "tls from a secret": {"router": {"tls": {"mode": "secret", "secretName": "routers"}}},
    "mutual tls from secrets": {"router": {"tls": SECRET_TLS}},
    "tls by cert-manager": {"router": {"tls": {"mode": "certManager", "issuerRef": ISSUER}}},
    "mutual tls by cert-manager": {"router": {"tls": {"mode": "certManager", "mutual": True, "issuerRef": ISSUER}}},
    "self-signed tls": {"router": {"tls": {"mode": "selfSigned"}}},
    "mutual self-signed tls": {"router": {"tls": {"mode": "selfSigned", "mutual": True}}},
    "hash key from a secret": {"router": {"hashKey": {"secretName": "hashes"}}},
    "routers' switches": {
        "router": {
            "dashboard": False,
            "drainTimeout": "2m",
            "logLevel": "debug",
            "otlp": {"endpoint": "http://collector.monitoring:4317"},
            "extraEnv": [HEADERS],
        }
    },
    "tokenizers": {"router": {"tokenizers": TOKENIZERS}},
    "recording": {"router": {"record": {"enabled": True}}},
    "recording with a common key": {"router": {"record": RECORD}},
    "renderers": {
        "router": {
            "tokenizers": TOKENIZERS,
            "renderers": [
                RENDERER,
                {
                    **RENDERER,
                    "name": "2",
                    "resources": {"requests": {"cpu": "2", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
                },
            ],
        }
    },
    "gateway": {
        "gateway": {
            "bundled": {
                "mode": "full-duplex",
                "service": {"type": "LoadBalancer", "port": 8000, "annotations": {"cloud": "internal"}},
                "drainTimeout": "1h",
                "allowPaths": ["/detokenize", "*"],
                "resources": {"limits": {"memory": "2Gi"}},
            }
        }
    },
    "no gateway": {"gateway": {"mode": "none"}, "test": {"url": "http://envoy.llm:8080"}},
    "no redis": {"redis": {"mode": "none"}},
    "redis elsewhere": {"redis": {"mode": "external", "external": {"url": "redis://redis.cache:6379/0"}}},
    "redis elsewhere, with everything": {
        "redis": {
            "mode": "external",
            "external": {
                "url": "rediss://redis.cache:6380/0",
                "existingSecret": "redis",
                "usernameKey": "user",
                "caSecret": "redis-ca",
            },
        }
    },
    "no network policies": {"networkPolicy": {"enabled": False}},
    "nobody measures": {"networkPolicy": {"metricsFrom": [], "kedaFrom": []}},
    "monitoring": {
        "monitoring": {
            "labels": {"release": "prometheus"},
            "serviceMonitor": {"enabled": True},
            "podMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "grafanaDashboard": {"enabled": True},
        }
    },
    "routers by an hpa": {"router": {"autoscaling": {"enabled": True, "minReplicas": 3, "maxReplicas": 12}}},
    "hpa": {"autoscaling": {"hpa": POOLS}},
    "keda": {"autoscaling": {"keda": POOLS}},
    "keda over tls": {"autoscaling": {"keda": POOLS}, "router": {"tls": {"mode": "secret", "secretName": "routers"}}},
    "keda over mutual tls": {
        "autoscaling": {"keda": [{**POOLS[0], "authentication": "dualmap"}]},
        "router": {"tls": SECRET_TLS},
    },
    "no test": {"test": {"enabled": False}},
    "test of a model": {"test": {"model": "qwen", "timeout": "3m"}},
}

# Releases of pickers only, which have no operator and no routers.
PICKER_CASES: Mapping[str, Mapping[str, Any]] = {
    "gaie": {"gateway": GAIE, "networkPolicy": {"gatewayFrom": GATEWAYS}},
    "gaie with istio": {
        "gateway": {**GAIE, "gaie": {**GAIE["gaie"], "istio": {"destinationRule": True}}},
        "networkPolicy": {"enabled": False},
    },
    "gaie in plain text": {
        "gateway": GAIE,
        "router": {"tls": {"mode": "none"}},
        "networkPolicy": {"gatewayFrom": GATEWAYS, "metricsFrom": []},
    },
    "gaie with everything": {
        "gateway": {
            "mode": "gaie",
            "gaie": {
                "pools": [
                    {
                        "name": "qwen",
                        "settings": SETTINGS,
                        "inferencePool": {
                            "selector": {"app": "qwen"},
                            "ports": [8000, 8001],
                            "failureMode": "FailClose",
                        },
                    }
                ]
            },
        },
        "router": {
            **PLACED,
            "tls": {"mode": "secret", "secretName": "routers"},
            "hashKey": {"secretName": "hashes"},
            "dashboard": False,
            "drainTimeout": "2m",
            "logLevel": "debug",
            "otlp": {"endpoint": "http://collector.monitoring:4317"},
            "extraEnv": [HEADERS],
            "tokenizers": TOKENIZERS,
            "renderers": [RENDERER],
            "record": RECORD,
        },
        "networkPolicy": {"gatewayFrom": GATEWAYS},
        "monitoring": {
            "labels": {"release": "prometheus"},
            "serviceMonitor": {"enabled": True},
            "prometheusRule": {"enabled": True},
            "grafanaDashboard": {"enabled": True},
        },
    },
}
