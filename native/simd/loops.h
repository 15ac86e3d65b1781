// Loops over constants, for work whose sums live in registers. The includer has the lanes of an instruction set.
#pragma once

#include <utility>

#include "runtime/types.h"

namespace noria::NORIA_ISA {

template <typename F, int... i>
inline NORIA_INLINE void for_each_index(std::integer_sequence<int, i...>, F&& f) {
  (f(std::integral_constant<int, i>{}), ...);
}
template <int n, typename F>
inline NORIA_INLINE void unroll(F&& f) {
  for_each_index(std::make_integer_sequence<int, n>{}, f);
}

// Calls f with M = rows, which is between 1 and `most`.
template <int most, typename F>
inline void with_rows(int64_t rows, F&& f) {
  unroll<most>([&](auto m) NORIA_INLINE {
    if (rows == m + 1) f(std::integral_constant<int, m + 1>{});
  });
}

// Cuts `rows` into groups of nearly equal size, at most `most` each, and calls f(row, M) for each.
template <int most, typename F>
inline void each_group(int64_t rows, F&& f) {
  const int64_t groups = ceil_div(rows, most);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t begin = g * rows / groups, end = (g + 1) * rows / groups;
    with_rows<most>(end - begin, [&](auto m) NORIA_INLINE { f(begin, m); });
  }
}

}  // namespace noria::NORIA_ISA
