// Work shared between the calling thread and XLA's thread pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace noria {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls work(first, last) until all `units` are done; every unit exactly once, by any of up to `threads` threads.
//
// A piece is a part of what is left, and at least `grain`: neighbouring units lie beside each other in memory, which is
// quicker to read in one go, and the last pieces are small, so that all threads end together.
//
// The caller works too and never waits for a helper that has not begun: in a busy pool it does everything itself. A
// helper that comes late finds nothing left and touches only the shared state, which outlives this call.
template <typename Pool, typename Work>
void parallel(Pool& pool, int64_t units, int64_t threads, int64_t grain, const Work& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
  };
  if (threads <= 1 || units <= grain) {
    work(int64_t{0}, units);
    return;
  }
  const auto shared = std::make_shared<Shared>();
  const Work* body = &work;
  auto take = [shared, body, units, threads, grain] {
    for (int64_t first = shared->next.load(std::memory_order_relaxed);;) {
      if (first >= units) return;
      const int64_t share = (units - first) / (2 * threads), piece = share > grain ? share : grain;
      const int64_t last = first + piece < units ? first + piece : units;
      if (!shared->next.compare_exchange_weak(first, last, std::memory_order_relaxed)) continue;
      const int64_t begin = first;
      (*body)(begin, last);
      shared->done.fetch_add(last - begin, std::memory_order_release);
      first = shared->next.load(std::memory_order_relaxed);
    }
  };
  using Task = decltype(take);
  const int64_t pieces = (units + grain - 1) / grain, helpers = (threads < pieces ? threads : pieces) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule(Task(take));
  take();
  for (int spins = 0; shared->done.load(std::memory_order_acquire) < units; ++spins) {
    if (spins < 10000) {
      relax();
    } else {
      std::this_thread::yield();  // the helper may have lost its processor to someone else
    }
  }
}

}  // namespace noria
