// fuzz [ROUNDS] [SEED]: random cases of every native op.
#include <cstdio>
#include <cstdlib>

#include "fuzz/tools.h"
#include "runtime/cpu.h"

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1000;
  noria::Random random(argc > 2 ? std::atoi(argv[2]) : 0);
  noria::fuzz_linear(random, rounds);
  noria::fuzz_attention(random, rounds);
  noria::fuzz_sampling(random, rounds);
  noria::Path paths[noria::kMaxPaths];
  const int count = noria::available_paths(paths);
  std::printf("%d random products, batches and choices agree on", rounds);
  for (int i = 0; i < count; ++i) std::printf(" %s", paths[i].name);
  std::printf("\n");
  return 0;
}
