"""`mqmk-daemon bench prepare`: the paper's data sets as the benchmarks read them."""

from pathlib import Path

import click


@click.command()
@click.argument("name", type=click.Choice(["imagenet-r", "domainnet", "cifar100"]))
@click.argument("src", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("dest", type=click.Path(file_okay=False, path_type=Path))
def prepare(name: str, src: Path, dest: Path) -> None:
    """Write a downloaded data set to DEST as {train,test}/CLASS/*, split as published.

    \b
    imagenet-r  SRC has a folder for each class. If it also has train.txt and
                test.txt (file and label a line), they are the split; else four
                fifths of the images are drawn as the published code draws them,
                with its seed. 24,000 and 6,000 images.
    domainnet   SRC has clipart/CLASS/*, infograph/CLASS/* and so on, and the
                lists train.txt and test.txt of DomainNet-200, which the
                repository of ESN publishes (they are not part of this package).
                Class folders are numbered as in the lists. 47,532 and 20,450.
    cifar100    SRC is cifar-100-binary. 50,000 and 10,000 images.

    Anything that differs in number from the published data is refused.
    """
    from mqmk.learner.bench.prepare import prepare as write

    click.echo(f"{dest}: {write(name, src, dest)}")
