package bench

import (
	"cmp"
	"fmt"
)

// blocks runs one for every arm in each of so many blocks, numbered from 0, in the
// order of the block before turned by one; first of all a warm-up, block -1, if
// asked for. A run that does not count says why, void, and with it its block does
// not, which is run once more at the end. So many voids that nothing can be said
// are told in refused; a void warm-up and an error of one end it all.
func blocks(runs, arms int, warm bool, one func(block, arm int) (void string, err error)) (refused string, err error) {
	block := func(n, turn int) (void string, err error) {
		for i := range arms {
			v, err := one(n, (i+turn)%arms)
			if err != nil {
				return "", err
			}
			void = cmp.Or(v, void)
		}
		return void, nil
	}
	if warm {
		if void, err := block(-1, 0); err != nil || void != "" {
			return "", cmp.Or(err, fmt.Errorf("bench: the first run failed: %s", void))
		}
	}
	all, voids, last := runs, 0, ""
	for n := 0; n < all; n++ {
		void, err := block(n, n)
		if err != nil {
			return "", err
		}
		if void != "" {
			last = void
			if voids++; n < runs {
				all++
			}
		}
	}
	if 5*voids > runs {
		refused = fmt.Sprintf("inconclusive: %d of %d blocks are void, the last since %s", voids, all, last)
	}
	return refused, nil
}
