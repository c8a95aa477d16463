"""``python -m tools.bill_of_materials``: write the dependencies of Polywire as CycloneDX, from the locks alone.

It needs no network, and the same locks give the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

from polywire.build_info import VERSION
from tools.locks import FOLDER, Pin, read_lock

SPECIFICATION: Final = "1.5"
LOCK: Final = "base"  # the requirements of the broker and its command
OUTPUT: Final = Path("dist/polywire.cdx.json")


def component(pin: Pin) -> dict[str, Any]:
    """Return a requirement as a CycloneDX component."""
    purl = f"pkg:pypi/{pin.name.lower().replace('_', '-')}@{pin.version}"
    made: dict[str, Any] = {"type": "library", "bom-ref": purl, "name": pin.name, "version": pin.version, "purl": purl}
    made["externalReferences"] = [
        {
            "type": "distribution",
            "url": f"https://pypi.org/project/{pin.name}/{pin.version}/",
            "hashes": [{"alg": "SHA-256", "content": digest} for digest in pin.hashes],
        }
    ]
    if pin.marker:
        made["properties"] = [{"name": "polywire:marker", "value": pin.marker}]
    return made


def bill(pins: list[Pin]) -> dict[str, Any]:
    """Return the bill of materials."""
    own = f"pkg:pypi/polywire@{VERSION}"
    components = [component(pin) for pin in pins]
    contents = json.dumps(components, sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "serialNumber": f"urn:uuid:{uuid5(NAMESPACE_URL, own + contents)}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": own,
                "name": "polywire",
                "version": VERSION,
                "purl": own,
                "licenses": [{"license": {"id": "Apache-2.0"}}],
            }
        },
        "components": components,
        "dependencies": [{"ref": own, "dependsOn": [made["bom-ref"] for made in components]}],
    }


def main(output: Path = OUTPUT) -> None:
    """Write the bill of materials."""
    pins = read_lock(FOLDER / f"{LOCK}.lock")
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(bill(pins), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{output}: {len(pins)} components\n")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:2]))
