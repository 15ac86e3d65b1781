// What the fuzz programs of the ops share.
#pragma once

#include <cstdint>
#include <random>
#include <thread>
#include <utility>
#include <vector>

namespace noria {

using Random = std::mt19937_64;

struct Threads {  // stands for XLA's pool
  std::vector<std::thread> running;
  template <typename F>
  void Schedule(F&& f) {
    running.emplace_back(std::forward<F>(f));
  }
  ~Threads() {
    for (auto& thread : running) thread.join();
  }
};

inline int64_t between(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

inline std::vector<float> floats(Random& random, int64_t count) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

// Random cases of an op; the first that fails is printed, and ends the program.
void fuzz_linear(Random& random, int rounds);
void fuzz_attention(Random& random, int rounds);
void fuzz_sampling(Random& random, int rounds);

}  // namespace noria
