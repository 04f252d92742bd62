// Slots that ranks lend each other: one is written again only once its old content has been read.
#include <deque>
#include <random>

#include "checked_collective.h"

using namespace farandole;
using testing::CheckedCollective;
using testing::kDataCollectives;
using testing::run_groups;

TEST(slots_are_written_again_only_when_all_have_read_them) {
  constexpr size_t kSizes[] = {1, 100, 4'000, 40'000, 150'000};  // of 32 KiB at most by one_shot
  const int operations = testing::kThreadSanitizer ? 50 : 150;
  for (const int size : {2, 3, 4})
    run_groups(size, ProgressMode::thread, [&](const std::shared_ptr<Group>& group) {
      std::mt19937 random(static_cast<unsigned>(size));  // the same on all ranks
      std::deque<CheckedCollective> works;
      for (int i = 0; i < operations; ++i) {
        const Collective kind = kDataCollectives[random() % std::size(kDataCollectives)];
        const bool by_one_shot = random() % 2 == 0;
        const size_t count = i % 50 == 49 ? 2'200'000 : kSizes[random() % (by_one_shot ? 3 : 5)];
        const bool fits = by_one_shot && count <= 4'000 / static_cast<size_t>(size);
        works.emplace_back(group, i % 50 == 49 ? Collective::all_reduce : kind, count,
                           static_cast<int>(random() % static_cast<unsigned>(size)), i);
        works.back().submit(*group, fits ? "one_shot" : "cico");
        if (works.size() < 5) continue;  // so many at once: ranks run ahead of each other
        works.front().check();
        works.pop_front();
      }
      for (CheckedCollective& work : works) work.check();
    });
}
