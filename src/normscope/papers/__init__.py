"""The experiments of three papers, two studies of normscope and the comparison of attribution methods."""
