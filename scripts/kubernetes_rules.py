"""Write the alerts of deploy/prometheus as an object of Prometheus Operator.

python -m scripts.kubernetes_rules
"""

from pathlib import Path

_DEPLOY = Path(__file__).resolve().parent.parent / "deploy"
RULES = _DEPLOY / "prometheus" / "rules.yml"
OBJECT = _DEPLOY / "kubernetes" / "components" / "monitoring" / "rules.yaml"
_HEAD = """\
# Made by scripts/kubernetes_rules.py from deploy/prometheus/rules.yml: change that, run it again.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: smart-embedder
  labels:
    app.kubernetes.io/name: smart-embedder
spec:
"""


def rule_object() -> str:
    """Return the object with the groups of rules.yml, indented as its `spec`."""
    lines = RULES.read_text("utf-8").splitlines(keepends=True)
    return _HEAD + "".join(f"  {line}" if line.strip() else line for line in lines)


if __name__ == "__main__":
    OBJECT.write_text(rule_object(), "utf-8")
