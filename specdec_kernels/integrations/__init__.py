"""The ops inside the engines people run. Each module needs its engine installed and imports it when it is used."""
