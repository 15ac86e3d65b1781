// Random rows of logits through every path of the choice of tokens, in memory that ends where the row ends.
//
// Built with AddressSanitizer and UBSan (make fuzz). Besides, every path must choose what a plain loop chooses: among
// the tokens that a sort leaves, the one with the most of logit and noise. Where two come close to each other, or to a
// threshold, roundings may differ, and those cases do not count.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "fuzz/tools.h"
#include "runtime/cpu.h"

namespace noria::sampling {
namespace {

uint32_t rotated(uint32_t x, int n) { return x << n | x >> (32 - n); }

// Threefry-2x32 as its paper writes it.
void threefry(const uint32_t (&key)[2], uint32_t (&x)[2]) {
  const uint32_t words[3] = {key[0], key[1], key[0] ^ key[1] ^ 0x1bd11bda};
  const int rotations[8] = {13, 15, 26, 6, 17, 29, 16, 24};
  x[0] += words[0], x[1] += words[1];
  for (int round = 0; round < 20; ++round) {
    x[0] += x[1];
    x[1] = rotated(x[1], rotations[round % 8]) ^ x[0];
    if (round % 4 != 3) continue;
    const int n = round / 4 + 1;
    x[0] += words[n % 3], x[1] += words[(n + 1) % 3] + n;
  }
}

double noise(const Row& row, int64_t token) {
  const uint32_t key[2] = {row.key_high, row.key_low};
  uint32_t folded[2] = {0, row.position}, bits[2] = {0, static_cast<uint32_t>(token)};
  threefry(key, folded);
  threefry(folded, bits);
  const uint32_t draw = (bits[0] ^ bits[1]) >> 9;
  return -std::log(-std::log(draw ? draw * 0x1p-23 : 0x1p-126));
}

// The best token by a plain loop, or -2 where it is a close call.
int32_t expected(const Row& row) {
  std::vector<double> scaled(row.logits, row.logits + row.vocab);
  for (int64_t i = 0; i < row.num_banned; ++i)
    if (row.banned[i] >= 0 && row.banned[i] < row.vocab) scaled[row.banned[i]] = -INFINITY;
  const auto most = std::max_element(scaled.begin(), scaled.end());
  if (*most == -INFINITY) return kNothingAllowed;
  if (row.temperature == 0) return static_cast<int32_t>(most - scaled.begin());
  const double largest = *most;
  for (double& each : scaled) each = (each - largest) / row.temperature;
  std::vector<double> sorted(scaled);
  std::sort(sorted.rbegin(), sorted.rend());
  double floor = -INFINITY;
  if (row.top_k > 0 && row.top_k < row.vocab) floor = sorted[row.top_k - 1];
  if (row.top_p < 1) {
    double total = 0, sum = 0;
    for (const double each : sorted) total += each >= floor ? std::exp(each) : 0;
    for (const double each : sorted) {
      sum += std::exp(each);
      if (std::abs(sum / total - row.top_p) < 1e-4) return -2;
      if (sum < row.top_p * total) continue;
      floor = std::max(floor, each);
      break;
    }
  }
  if (row.min_p > 0) {
    for (const double each : sorted)
      if (std::abs(each - std::log(row.min_p)) < 1e-4) return -2;
    floor = std::max(floor, std::min(0.0, std::log(static_cast<double>(row.min_p))));
  }
  double best = -INFINITY, second = -INFINITY;
  int32_t chosen = 0;
  for (int64_t token = 0; token < row.vocab; ++token) {
    if (scaled[token] < floor - 1e-9) continue;
    const double sum = scaled[token] + noise(row, token);
    if (sum > best) {
      second = best, best = sum, chosen = static_cast<int32_t>(token);
    } else {
      second = std::max(second, sum);
    }
  }
  return best - second < 1e-4 ? -2 : chosen;
}

}  // namespace
}  // namespace noria::sampling

namespace noria {

void fuzz_sampling(Random& random, int rounds) {
  Path paths[kMaxPaths];
  const int count = available_paths(paths);
  int close = 0;
  for (int round = 0; round < rounds; ++round) {
    const int64_t vocab = between(random, 1, between(random, 0, 1) ? 70 : 3000);
    std::vector<float> logits = floats(random, vocab);
    const auto spread = static_cast<float>(between(random, 1, 40)) / 4;
    for (float& each : logits) each = between(random, 0, 9) ? each * spread : -INFINITY;
    std::vector<int32_t> banned(between(random, 0, 3));
    for (int32_t& each : banned) each = static_cast<int32_t>(between(random, -1, vocab));
    const auto one_of = [&](std::vector<float> values) { return values[between(random, 0, values.size() - 1)]; };
    const sampling::Row row{logits.data(), vocab, banned.data(), static_cast<int64_t>(banned.size()),
                            one_of({0.0f, 0.3f, 1.0f, 1.7f}), one_of({1.0f, 1.0f, 0.95f, 0.5f, 1e-6f}),
                            one_of({0.0f, 0.0f, 0.05f, 1.0f}),
                            static_cast<int32_t>(between(random, 0, 1) ? 0 : between(random, 1, vocab + 2)),
                            static_cast<uint32_t>(random()), static_cast<uint32_t>(random()),
                            static_cast<uint32_t>(between(random, 0, 5000))};
    const int32_t expected = sampling::expected(row);
    close += expected == -2;
    for (int i = 0; i < count && expected != -2; ++i) {
      if (const int32_t chosen = paths[i].sampling->choose(row); chosen != expected) {
        std::printf("round %d, %s: token %d instead of %d of %d\n", round, paths[i].name, chosen, expected,
                    static_cast<int>(vocab));
        std::exit(1);
      }
    }
  }
  if (close * 4 > rounds && rounds > 20) {
    std::printf("%d of %d choices were too close to tell\n", close, rounds);
    std::exit(1);
  }
}

}  // namespace noria
