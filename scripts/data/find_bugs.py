#!/usr/bin/env python3
"""Find a release for each bug of tests4py, and write the recipe of `composer-nb tasks bugs`: `find_bugs.py [PROJECT …]`.

For each bug the releases below are tried, the newest first: one is written down with its digest if the fix can be reversed in it,
it passes the tests, fails them without the fix, and repeats agree. Where none does, the reason is written. Needs tests4py, bwrap
and a package index. Interrupted, it goes on with the next bug; a bug whose row is removed from the recipe is tried again.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from pathlib import Path

from composer_nb.harness.files import write_json
from composer_nb.harness.sandbox import open_backend
from composer_nb.harness.sandbox.contract import Backend
from composer_nb.harness.tasks.making.bugs import (
    MAX_LINES,
    RECIPE,
    SUITE_S,
    Bug,
    Project,
    draft_bug,
    fetch,
    install,
    read_recipe,
    resources,
)
from composer_nb.harness.tasks.making.mine import try_candidate
from composer_nb.harness.tasks.making.options import RunOptions

MAX_TRIES = 4  # Releases of a bug that are run.
REASONS = {"ungraded": "its tests fail with the fix too", "unseen": "its tests pass without the fix too"}
REQUESTS = "requests==2.31.0 urllib3==2.0.7 idna==3.4 certifi==2023.7.22 charset-normalizer==3.3.2"
# Project -> name in the index, packages that it imports, and releases with a wheel, the newest first.
PROJECTS: dict[str, tuple[str, str, str]] = {
    "thefuck": (
        "thefuck",
        "psutil==5.9.6 colorama==0.4.6 six==1.16.0 decorator==5.1.1 pyte==0.8.1 wcwidth==0.2.8 pathlib==1.0.1 "
        "setuptools==68.2.2",
        "3.32 3.31 3.30 3.29 3.28 3.26 3.25 3.24 3.23 3.20 3.15 3.12 3.11 3.9 3.7 3.5 3.3 3.2 3.0 2.9.1 2.8 2.7 2.5.6 2.5.3 2.4 "
        "2.2 2.0 1.49.1 1.48 1.46 1.44 1.42 1.40 1.38 1.37",
    ),
    "youtubedl": (
        "youtube-dl",
        "",
        "2021.1.8 2020.9.20 2020.3.24 2019.9.28 2019.4.17 2019.1.2 2018.11.7 2018.7.21 2018.3.26 2018.2.25 2017.12.14 2017.8.27 "
        "2017.3.7 2017.2.17 2017.2.1 2017.1.2 2016.10.7 2016.8.7 2016.4.24 2016.3.14 2016.2.13 2015.12.13 2015.10.6 2015.2.24 "
        "2015.2.6 2015.1.30.2 2014.12.15 2014.11.26 2014.11.21.1 2014.11.13 2014.10.15 2014.9.15 2014.8.5 2014.3.25",
    ),
    "tqdm": ("tqdm", "", "4.62.3 4.50.0 4.43.0 4.41.1 4.36.1 4.35.0 4.32.0 4.28.1 4.24.0 4.23.0 4.21.0 4.19.5"),
    "black": (
        "black",
        "click==8.0.4 attrs==23.1.0 appdirs==1.4.4 toml==0.10.2 regex==2023.12.25 pathspec==0.11.2 typing_extensions==4.8.0",
        "19.10b0 19.3b0 18.9b0 18.6b4 18.6b1 18.5b1 18.4a3",
    ),
    "sanic": (
        "sanic",
        "aiofiles==0.8.0 httptools==0.6.1 multidict==6.0.5 websockets==10.4 httpx==0.25.0 httpcore==0.18.0 anyio==3.7.1 "
        "sniffio==1.3.0 idna==3.4 certifi==2023.7.22 h11==0.14.0 sanic-routing==0.6.2",
        "21.3.4 20.12.7 20.9.1 20.6.3 20.3.0 19.12.2",
    ),
    "httpie": (
        "httpie",
        f"{REQUESTS} pygments==2.16.1 requests-toolbelt==1.0.0 setuptools==68.2.2",
        "2.6.0 2.3.0 2.1.0 1.0.3 1.0.0 0.9.9 0.9.8 0.9.4 0.9.2",
    ),
    "pysnooper": ("pysnooper", "six==1.16.0 decorator==5.1.1 future==1.0.0", "0.2.4 0.2.2 0.0.39 0.0.30 0.0.25"),
    "cookiecutter": (
        "cookiecutter",
        f"{REQUESTS} jinja2==3.0.3 click==8.1.7 markupsafe==2.1.2 python-slugify==8.0.1 text-unidecode==1.3 binaryornot==0.4.4 "
        "chardet==5.2.0 poyo==0.5.0 jinja2-time==0.2.0 arrow==1.3.0 python-dateutil==2.8.2 six==1.16.0 "
        "types-python-dateutil==2.8.19.14 pyyaml==6.0.1",
        "2.2.3 2.1.1 1.7.3 1.7.2 1.7.0 1.6.0",
    ),
    "fastapi": (
        "fastapi",
        f"{REQUESTS} starlette==0.13.6 pydantic==1.10.13 typing_extensions==4.8.0 python-multipart==0.0.6 anyio==3.7.1 "
        "sniffio==1.3.0 httpx==0.25.0 httpcore==0.18.0 h11==0.14.0",
        "0.68.2 0.63.0 0.61.2 0.60.0 0.55.1 0.53.0 0.52.0 0.47.1 0.45.0 0.42.0 0.38.1 0.29.1 0.20.0",
    ),
    "luigi": (
        "luigi",
        "tornado==6.2 python-dateutil==2.8.2 six==1.16.0 tenacity==8.2.3 typing_extensions==4.8.0",
        "3.8.1 3.7.1",
    ),
    "tornado": ("tornado", "", "6.4.2 6.2"),
    "scrapy": (
        "scrapy",
        f"{REQUESTS} twisted==22.10.0 lxml==4.9.3 w3lib==2.1.2 parsel==1.8.1 queuelib==1.6.2 cssselect==1.2.0 "
        "PyDispatcher==2.0.7 six==1.16.0 service-identity==23.1.0 pyopenssl==23.2.0 cryptography==41.0.4 cffi==1.16.0 "
        "pycparser==2.21 attrs==23.1.0 pyasn1==0.5.0 pyasn1-modules==0.3.0 automat==22.10.0 constantly==15.1.0 "
        "hyperlink==21.0.0 incremental==22.10.0 zope.interface==6.1 itemadapter==0.8.0 itemloaders==1.1.0 "
        "jmespath==1.0.1 protego==0.3.0 tldextract==5.0.1 requests-file==1.5.1 filelock==3.12.4 "
        "typing_extensions==4.8.0 setuptools==68.2.2",
        "2.6.3 2.5.1 2.4.1 2.2.1 2.0.1 1.8.4 1.6.0 1.5.2 1.4.0 1.3.3 1.2.1 1.1.4",
    ),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("projects", nargs="*", default=[*PROJECTS])
    parser.add_argument("--cache", type=Path, default=Path("build/bugs"), help="folder for wheels and packages")
    args = parser.parse_args()
    recipe = read_recipe() if RECIPE.is_file() else {}
    with open_backend("bwrap") as backend:
        for name in args.projects:
            distribution, packages, releases = PROJECTS[name]
            running = RunOptions(suite_s=SUITE_S, packages=install(packages.split(), args.cache / "packages"))
            bugs = dict(recipe[name].bugs) if name in recipe else {}
            for number in sorted(int(folder.name[4:]) for folder in (resources() / name).glob("bug_*")):
                if number in bugs:
                    continue
                bugs[number] = search(name, number, distribution, releases.split(), args.cache, backend, running)
                print(f"{name} {number}: {bugs[number].release or bugs[number].refused}", flush=True)
                bugs = dict(sorted(bugs.items()))
                project = Project(distribution=distribution, packages=tuple(packages.split()), bugs=bugs)
                recipe[name] = project
                write_json(RECIPE, {key: row.model_dump(exclude_defaults=True) for key, row in sorted(recipe.items())})
    return 0


def search(
    name: str, number: int, distribution: str, releases: list[str], cache: Path, backend: Backend, running: RunOptions
) -> Bug:
    """Return the row of a bug: the newest release in which it makes a task, or why none does."""
    refused, tries = "the fix can be reversed in no release that was tried", 0
    for release in releases:
        wheel = fetch(distribution, Bug(release=release), cache / "wheels")
        try:
            candidate = draft_bug(name, number, wheel, resources())
        except FileNotFoundError:
            return Bug(refused="tests4py has no tests of it")
        except ValueError:
            continue
        outcome, _ = try_candidate(candidate, backend, running, MAX_LINES)
        if outcome.task:
            return Bug(release=release, sha256=hashlib.sha256(wheel.read_bytes()).hexdigest())
        refused, tries = f"{release}: {REASONS.get(outcome.verdict, outcome.verdict)}", tries + 1
        if tries == MAX_TRIES:
            break
    return Bug(refused=refused)


if __name__ == "__main__":
    sys.exit(main())
